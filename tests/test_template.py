"""Packages of ``topkv new`` pass the kit, are clean, and equal ``examples/minimal``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from topkv.entries import HOOK_API
from topkv.errors import ConfigError
from topkv_cli.group import topkv as command
from topkv_cli.render import KINDS, LONGEST, WITH_KERNELS, render

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "minimal"
CACHES = {"__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache", ".mypy_cache"}

# Fewer examples than an author gets, so that each suite takes seconds.
PROFILE = """from hypothesis import Phase, settings

settings.register_profile(
    "few", max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)
settings.load_profile("few")
"""

KERNELS = "algorithm --kernels"
PACKAGES = (*KINDS, *(f"{kind} --kernels" for kind in WITH_KERNELS))
"""Arguments behind ``--kind`` of all packages that there are."""

# For each reference a piece of code, its wrong form, and the test of the kit that sees it.
BREAKS = {
    "algorithm": (".amax(2)", ".amin(2)", "test_every_query_head_finds_its_needle"),
    "stage": ("descending=True", "descending=False", "test_the_best_candidates_are_left"),
    "backend": ("norm.flatten(0, 1).mT", "norm.flatten(0, 1).mT + 1", "test_prefill_beyond"),
    "transfer": ("staged.to(", "staged.flip(0).to(", "test_wide_selections"),
    "eviction": ("position - gone", "position", "test_new_positions_are_a_permutation"),
    "topk": ("len(column) - 1 - column", "column", "test_of_equal_scores_the_lower_index_wins"),
    "observer": ("sum(slot >= 0 for", "sum(slot >= -1 for", "test_it_gathers"),
    "storage": ("setdefault(key, whole)", "update({key: whole})", "test_the_first_put_stays"),
    KERNELS: ("mean.float())", "-mean.float())", "test_needle_in_a_prompt"),
}

# Likewise for each device function.
BROKEN_KERNELS = {
    "write_mean": ("+ d, mean, d", "+ d, -mean, d", "needle_in_a_prompt"),
    "add_products": ("mean.to(q.dtype), q,", "-mean.to(q.dtype), q,", "needle_in_a_prompt"),
}


LEAST = {"eviction": 7, "observer": 6, "storage": 6, "topk": 13}
"""Least number of tests that pass without a device, for suites that have few."""


def new(*args):
    return CliRunner().invoke(command, ["new", *map(str, args)])


def make(tmp_path, name, kind):
    """Render a package, and write beside its sources the metadata that pip would write."""
    root = tmp_path / kind.replace(" ", "") / name
    done = new(name, "--kind", *kind.split(), "--output", root)
    assert done.exit_code == 0, done.stderr
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    info = root / "src" / f"topkv_{name.replace('-', '_')}-0.2.0.dist-info"
    info.mkdir()
    head = {"Metadata-Version": "2.1", "Name": project["name"], "Version": project["version"]}
    (info / "METADATA").write_text("".join(f"{key}: {value}\n" for key, value in head.items()))
    points = project["entry-points"]["topkv"]
    lines = "".join(f"{key} = {value}\n" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[topkv]\n{lines}")
    return root


def run(*args, roots=(), cwd=None):
    """Run Python in a process that finds the packages at ``roots``, as if they were installed."""
    found = [*(str(root / "src") for root in roots), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(part for part in found if part)
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=cwd,
        env=environment,
    )


@pytest.fixture
def profile(tmp_path):
    """A root whose module ``few`` sets the profile."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "few.py").write_text(PROFILE)
    return tmp_path


def kit(root, profile, *args):
    command = ("-m", "pytest", "-q", "-p", "few", "-p", "no:cacheprovider", *args)
    return run(*command, roots=(root, profile), cwd=root)


def tree(root):
    """Bytes by path, without what tools leave behind."""
    paths = (path for path in root.rglob("*") if path.is_file() and not CACHES & {*path.parts})
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def test_the_example_is_what_new_writes(tmp_path):
    done = new("minimal", "--kind", "algorithm", "--output", tmp_path / "minimal")
    assert done.exit_code == 0, done.stderr
    assert tree(EXAMPLE) == tree(tmp_path / "minimal"), (
        "examples/minimal is not what the template gives; remove it and run "
        "topkv new minimal --kind algorithm --output examples/minimal"
    )


def by_night(values, *kept):
    """Parameters, of which all but a few wait for the night."""
    return [
        pytest.param(value, marks=[] if value in kept else [pytest.mark.nightly])
        for value in values
    ]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", by_night(PACKAGES, *set(PACKAGES) - {KERNELS}))
def test_a_new_package_passes_the_kit(tmp_path, profile, kind):
    done = kit(make(tmp_path, "my-own", kind), profile)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed >= LEAST.get(kind, 15), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", by_night(PACKAGES, KERNELS, "stage", "topk"))
def test_a_new_package_that_is_broken_fails(tmp_path, profile, kind):
    right, wrong, test = BREAKS[kind]
    root = make(tmp_path, "my_own", kind)
    path = root / "src" / "topkv_my_own" / f"{kind.split()[0]}.py"
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    done = kit(root, profile, "-x", "-k", f"cpu and {test}")
    assert done.returncode == 1, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("function", by_night(BROKEN_KERNELS, "write_mean"))
def test_a_device_function_that_is_broken_fails_alone(tmp_path, profile, function):
    """The kit fails the kernels in the interpreter, and passes the reference beside them."""
    right, wrong, test = BROKEN_KERNELS[function]
    root = make(tmp_path, "my_own", KERNELS)
    path = root / "src" / "topkv_my_own" / "algorithm.py"
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    broken = kit(root, profile, "-x", "-k", f"interpret and {test}")
    assert broken.returncode == 1, broken.stdout + broken.stderr
    kept = kit(root, profile, "-x", "-k", "cpu and needle_in_a_prompt")
    assert kept.returncode == 0, kept.stdout + kept.stderr


@pytest.mark.slow
def test_a_new_package_with_kernels_runs_them(tmp_path, profile):
    """Both tiers that need no device run the suite: the reference and the interpreter."""
    root = make(tmp_path, "my-own", KERNELS)
    done = kit(root, profile, "-vv", "-k", "test_chunks_of_a_prompt_do_not_matter")
    for tier in ("cpu", "interpret"):
        assert re.search(rf"\[{tier}.*PASSED", done.stdout), done.stdout + done.stderr


def test_new_packages_are_found_and_light(tmp_path):
    """New packages are listed with the hook API of this core as a literal, and without torch."""
    names = [f"my-{kind.replace(' --', '-')}" for kind in PACKAGES]
    roots = [make(tmp_path, *both) for both in zip(names, PACKAGES, strict=True)]
    found = run("-c", LISTED, roots=roots)
    assert found.returncode == 0, found.stderr
    modules = [name.replace("-", "_") for name in names]
    expected = [
        f"{kind.split()[0]} {module} topkv-{name} 0.2.0 {HOOK_API} None"
        for kind, name, module in zip(PACKAGES, names, modules, strict=True)
    ]
    assert sorted(found.stdout.splitlines()) == sorted(expected)
    for root, module in zip(roots, modules, strict=True):
        entry = (root / "src" / f"topkv_{module}" / "entry.py").read_text()
        assert f"hook_api=({HOOK_API[0]}, {HOOK_API[1]})," in entry


LISTED = """
import sys
from topkv.plugins import registry
for r in registry().records():
    if r.name.startswith("my_"):
        print(r.kind, r.name, r.package, r.version, r.entry and r.entry.hook_api, r.problem)
heavy = {"torch", "triton", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_rendered_code_is_clean(tmp_path):
    """Clean under its own ruff settings, whatever the length of the name."""
    for name in ("a", "z" * LONGEST):
        for kind in PACKAGES:
            make(tmp_path, name, kind)
    for args in (["check"], ["format", "--diff"]):
        done = run("-m", "ruff", *args, "--no-cache", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", by_night(["algorithm", KERNELS], KERNELS))
def test_rendered_code_is_typed(tmp_path, kind):
    pytest.importorskip("mypy")
    root = make(tmp_path, "mine", kind)
    done = run("-m", "mypy", "--cache-dir", tmp_path / "cache", root / "src", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("Mean-Keys", "algorithm", "write it like mean-keys"),
        ("2nd", "algorithm", "got '2nd'"),
        ("mean--keys", "backend", "got 'mean--keys'"),
        ("keys-", "backend", "got 'keys-'"),
        ("../keys", "backend", "got '../keys'"),
        ("", "backend", "got ''"),
        ("topkv-mean-keys", "transfer", "write mean-keys"),
        ("m" * (LONGEST + 1), "transfer", f"at most {LONGEST} characters"),
        (
            "mean-keys",
            "engine",
            "one of algorithm, stage, backend, transfer, eviction, topk, observer, storage, got",
        ),
        ("gather", "backend", "the conformance kit has backend 'gather'"),
    ],
)
def test_names_that_cannot_be_are_refused(name, kind, reason):
    with pytest.raises(ConfigError) as refused:
        render(name, kind)
    assert reason in str(refused.value)


def distribution(folder, name, *lines):
    """Write metadata of an installed distribution."""
    info = folder / f"{name}-9.9.dist-info"
    info.mkdir()
    head = ["Metadata-Version: 2.1", f"Name: {name.replace('_', '-')}", "Version: 9.9", *lines]
    (info / "METADATA").write_text("\n".join(head) + "\n")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        # Names that `pip install -e .` would replace.
        (
            "transformers",
            ["the distribution topkv-transformers 0", "offers engine 'transformers'"],
        ),
        ("quest", ["the distribution topkv-quest 0", "offers algorithm 'quest'"]),
        ("deepseek-dsa", ["the distribution topkv-deepseek-dsa", "algorithm 'deepseek_dsa'"]),
        ("ghost", ["the distribution topkv-ghost 9.9 is installed"]),
        ("to_come", ["an extra of topkv names the distribution topkv-to-come"]),
        # Plugins of any kind.
        ("pivot", ["topkv-triton-topk 0.2.0 offers topk 'pivot'"]),
        ("zero-copy", ["topkv 0.2.0 offers transfer 'zero_copy'"]),
    ],
)
def test_a_package_that_would_stand_in_for_another_is_refused(
    tmp_path, monkeypatch, name, kind, reasons
):
    known = tmp_path / "installed"
    known.mkdir()
    distribution(known, "topkv_ghost")
    extras = ['Requires-Dist: topkv-To_Come>=1; extra == "all"', "Provides-Extra: all"]
    distribution(known, "topkv", "Requires-Dist: attrs>=23", *extras)
    monkeypatch.syspath_prepend(known)
    done = new(name, "--kind", kind, "--output", tmp_path / "made")
    assert done.exit_code == 2, done.stdout
    for reason in reasons:
        assert reason in done.stderr
    assert "choose another name" in done.stderr
    assert not (tmp_path / "made").exists()
    assert new("attrs", "--kind", kind, "--output", tmp_path / "made").exit_code == 0


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(WITH_KERNELS)))
def test_kinds_without_kernels_in_their_template_are_refused(tmp_path, kind):
    done = new("mine", "--kind", kind, "--kernels", "--output", tmp_path / "made")
    assert done.exit_code == 2, done.stdout
    assert f"kernels come with kind algorithm, got '{kind}'; leave --kernels out" in done.stderr
    assert not (tmp_path / "made").exists()


def test_the_help_says_which_kind_has_kernels():
    assert "device functions beside the reference" in " ".join(new("--help").stdout.split())


def test_every_reason_is_reported_at_once():
    with pytest.raises(ConfigError) as refused:
        render("Topkv" * 9, "engine")
    assert len(refused.value.reasons) == 3


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "there").mkdir()
    done = new("mine", "--kind", "backend", "--output", tmp_path / "there")
    assert done.exit_code == 2
    assert "there exists" in done.stderr
    assert "name another one, or remove it" in done.stderr
    assert not list((tmp_path / "there").iterdir())
    (tmp_path / "file").write_text("")
    below = new("mine", "--kind", "backend", "--output", tmp_path / "file" / "below")
    assert below.exit_code == 2
    assert "cannot be written" in below.stderr


def test_a_name_that_is_wrong_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = new("Mine", "--kind", "backend")
    assert done.exit_code == 2
    assert "error: a plugin package cannot be made" in done.stderr
    assert not list(tmp_path.iterdir())
    assert new("mine", "--kind", "backend").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["topkv-mine"]
