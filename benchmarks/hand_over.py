"""Seconds to hand a request over through a storage: to store its blocks, and to read them again.

    python benchmarks/hand_over.py --storage files --params '{"path": "/tmp/sessions"}' --out ...

Blocks are random bytes, as many and as large as those of a request of ``--gib`` GiB; making and
taking them, which ``topkv_prefixes.suspended`` does, does not count. Each line is a round, in
which every byte is compared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from topkv_prefixes.stored import StoredSessions
from topkv_prefixes.suspended import BLOCK_BYTES


def measure(stored: StoredSessions, blocks: list[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Measure seconds to store and to read."""
    session = stored["benchmark"]
    session.discard()
    began = time.perf_counter()
    session.write({}, [({}, blocks)])
    written = time.perf_counter()
    took, found = 0.0, session.read().blocks(0)
    for block in blocks:
        start = time.perf_counter()
        read = next(found)
        took += time.perf_counter() - start
        if not torch.equal(read["group0"], block["group0"]):
            raise SystemExit("other bytes came back")
    session.discard()
    return written - began, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", default="files")
    parser.add_argument("--params", type=json.loads, default={}, help="of the storage, as JSON")
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    args = parser.parse_args()
    random = torch.Generator().manual_seed(0)
    size = int(args.gib * 2**30)
    blocks = [
        {"group0": torch.randint(256, (min(BLOCK_BYTES, size - at),), generator=random).byte()}
        for at in range(0, size, BLOCK_BYTES)
    ]
    with StoredSessions(args.storage, args.params, limit_s=300) as stored:
        for _ in range(args.repeats):
            write, read = measure(stored, blocks)
            row = {"storage": args.storage, "gib": args.gib, "write_s": write, "read_s": read}
            line = json.dumps(
                {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}
            )
            print(line)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
