"""What every benchmark's JSON says beside its rows: the machine, the versions, the ratios."""

import importlib.metadata
import json
import os
import platform
import statistics
from pathlib import Path


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def machine() -> dict:
    """Architecture, processor, cores this process may use, memory in bytes, GPU (None: none is seen by torch)."""
    found = {"host": platform.machine(), "processor": processor(), "cores": len(os.sched_getaffinity(0)),
             "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "gpu": None}
    import torch
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {"name": properties.name, "memory_bytes": properties.total_memory,
                        "capability": list(torch.cuda.get_device_capability(0)),
                        "multiprocessors": properties.multi_processor_count}
    return found


def versions(*packages: str) -> dict:
    """Python's version and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def spread(values) -> dict:
    """Median, least, greatest and number of repeats."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def write(path: str | None, name: str, rows: list[dict], ratios: dict, **more) -> None:
    """The JSON of a benchmark; prints its machine and ratios. path None: only prints."""
    result = {"name": name, "machine": machine(), **more, "rows": rows, "ratios": ratios}
    print(f"on {result['machine']['processor']}, {result['machine']['cores']} cores; "
          + ", ".join(f"{k} {v}" for k, v in more.get("versions", {}).items()))
    for key, value in ratios.items():
        print(f"{key} = {value:.3f}")
    if path:
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
