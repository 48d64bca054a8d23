"""Put and get through the storage, in GiB/s, over a store that runs.

Objects are in one host pool, as pages are, and their headers beside it. One line of JSON for each
number of threads; each figure is that of the fastest of ``--repeats`` rounds over fresh objects.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from topkv_mooncake.entry import topkv_register_storages
from topkv_mooncake.storage import MooncakeStorage
from topkv_prefixes.storage import StorageSetup

HEADER = 4096
(ENTRY,) = topkv_register_storages()


def timed(threads: int, batches: list[Any], call: Callable[[Any], Any]) -> float:
    """Seconds of a call for each batch."""
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        answers = list(pool.map(call, batches))
        took = time.perf_counter() - began
    if not all(all(answer) for answer in answers):
        raise SystemExit("the store took or gave less than all objects; give it more memory")
    return took


def measure(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """A row."""
    pool = np.random.default_rng(0).integers(0, 256, args.objects * args.bytes, dtype=np.uint8)
    headers = np.zeros((args.objects, HEADER), dtype=np.uint8)
    params = ENTRY.parameters(master=args.master, namespace="benchmark")
    params |= {"segment": args.segment, "protocol": args.protocol}
    storage = MooncakeStorage(StorageSetup(params, args.bytes + HEADER, pool))
    places = [
        [headers[at], pool[at * args.bytes : (at + 1) * args.bytes]] for at in range(args.objects)
    ]
    expected, puts, gets = pool.copy(), [], []
    size = args.objects * (args.bytes + HEADER) / 2**30
    try:
        for turn in range(args.repeats):
            keys = [bytes([turn]) + at.to_bytes(31, "big") for at in range(args.objects)]
            batches = [
                (keys[at : at + args.batch], places[at : at + args.batch])
                for at in range(0, args.objects, args.batch)
            ]
            puts.append(timed(threads, batches, lambda each: storage.put(*each)))
            pool[:] = 0
            gets.append(timed(threads, batches, lambda each: storage.get(*each)))
            if not (pool == expected).all():
                raise SystemExit("other bytes came back")
            storage.delete(keys)
    finally:
        storage.close()
    return {
        "memory": "own" if args.segment else "another process",
        "protocol": args.protocol,
        "objects": args.objects,
        "object_bytes": args.bytes,
        "batch": args.batch,
        "threads": threads,
        "put_gib_s": round(size / min(puts), 2),
        "get_gib_s": round(size / min(gets), 2),
        "put_s": [round(each, 3) for each in puts],
        "get_s": [round(each, 3) for each in gets],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master", default="127.0.0.1:50051")
    parser.add_argument("--protocol", default="tcp")
    parser.add_argument("--segment", help="memory of this process, such as 1GiB; none by default")
    parser.add_argument("--objects", type=int, default=128)
    parser.add_argument("--bytes", type=int, default=2 << 20, help="of an object")
    parser.add_argument("--batch", type=int, default=16, help="objects of a call")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for threads in args.threads:
        line = json.dumps(measure(args, threads))
        print(line)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
