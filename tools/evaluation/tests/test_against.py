"""The script that sets an algorithm against others, on rows by hand."""

from __future__ import annotations

import json
import lzma

import pytest

SCRIPT = "against"


def row(algorithm, family, kl, data="d", **more):
    return {"algorithm": algorithm, "plugin": algorithm, "family": family, "kl_contexts": kl,
            "data": data, "model": "m", "length": 64, "nominal_percent": 5.0, "dense_layers": [],
            "device_bytes_per_token": 10, "link_bytes_per_token": 1, "context_bytes": 99,
            **more}  # fmt: skip


ROWS = [
    row("mine", "prose", [1.0, 2.0, 3.0]),
    row("mine", "code", [5.0]),
    row("its", "prose", [1.5, 2.5, 3.5], device_bytes_per_token=30),
    row("its", "code", [5.5]),
    row("other", "prose", [9.0, 1.0, 2.0], data="another"),
    row("dense", "prose", [0.0, 0.0, 0.0], plugin=None),
    row("gone", "prose", None, refused="why"),
    row("older", "prose", None),
    row("mine", "prose", [7.0, 7.0, 7.0], nominal_percent=1.0),
]


@pytest.mark.parametrize("packed", [False, True])
def test_rows_stand_beside_one_on_the_same_contexts(script, tmp_path, capsys, packed):
    text = "".join(json.dumps(each) + "\n" for each in ROWS)
    if packed:
        where = tmp_path / "rows.jsonl.xz"
        where.write_bytes(lzma.compress(text.encode()))
    else:
        where = tmp_path
        (tmp_path / "part").mkdir()
        (tmp_path / "part" / "results.jsonl").write_text(text)
    out = tmp_path / "out.jsonl"
    script.main([str(where), "--row", "mine", "--out", str(out)])
    found = {(x["algorithm"], x["nominal_percent"]): x for x in map(json.loads, out.open())}
    assert found.keys() == {("mine", 5.0), ("its", 5.0), ("mine", 1.0)}
    its = found["its", 5.0]
    assert (its["contexts"], its["kl"], its["more"]) == (4, 3.25, 0.5)
    assert (its["more_low"], its["more_high"]) == pytest.approx((0.5, 0.5))
    # The one context of code is in every draw: at least (3 * 1.5 + 5.5) / 4.
    assert 2.5 <= its["low"] < 3.25 < its["high"] <= 4.0
    assert its["device_bytes_per_token"] == 20
    mine = found["mine", 5.0]
    assert (mine["more"], mine["more_low"], mine["more_high"]) == (0, 0, 0)
    assert "+0.5000 [+0.5000, +0.5000]  of 4" in capsys.readouterr().out
