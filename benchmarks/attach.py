"""Time to map, touch and register host memory per GiB, with and without huge pages.

    python benchmarks/attach.py --out benchmarks/results/attach.jsonl

Each line makes a pool of ``gib`` GiB as attaching a model does, ``REPEATS`` times, and reports
the medians in seconds per GiB. ``threads`` are those that touched it, on as many of the cores
near the GPU, and ``huge`` is true if huge pages were asked for. The first line has what the system
offers. ``first`` is touching the first time: a virtual machine may have to wait for its host to
provide memory that it never used before. With ``--device cpu`` nothing is registered.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from topkv.kv.host_mapping import MOST_THREADS, cpus_near
from topkv_cli import probes
from topkv_cli.attaching import measure

REPEATS = 5


def cell(gib: float, threads: int, huge: bool, device: torch.device) -> dict[str, object]:
    """Measure one line."""
    cpus = set(sorted(cpus_near(device))[:threads])
    times = [measure(int(gib * 2**30), device, cpus, huge) for _ in range(REPEATS)]
    line = {"what": "attach", "gib": gib, "threads": len(cpus), "huge": huge}
    for step in ("map", "touch", "register"):
        if times[0][step] is not None:
            line[step] = statistics.median(time[step] for time in times)
    return {**line, "first": times[0]["touch"], "nodes": times[0]["nodes"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here as well")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to register nothing")
    parser.add_argument("--gib", type=float, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, MOST_THREADS])
    options = parser.parse_args()
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    lines: list[dict[str, object]] = [
        {
            "what": "machine",
            "device": name,
            "cores_near": len(cpus_near(device)),
            "huge_pages": probes.huge_pages(),
            "numa_nodes": probes.numa_nodes(),
        }
    ]
    print(lines[0])
    for gib in options.gib:
        for threads in options.threads:
            for huge in (False, True):
                lines.append(cell(gib, threads, huge, device))
                print(
                    {k: round(v, 4) if isinstance(v, float) else v for k, v in lines[-1].items()}
                )
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
