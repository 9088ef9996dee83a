"""Runs make for each target in order, until one fails, and prints the time of each target.

python tools/stages.py MAKE TARGET...
"""

import resource
import subprocess
import sys
import time


def main(make: str, targets: list[str]) -> int:
    table, status = [], 0
    for target in targets:
        print(f"== {target}", flush=True)
        start_usage, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        status = subprocess.run([make, "--no-print-directory", target], check=False).returncode
        wall, usage = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = usage.ru_utime + usage.ru_stime - start_usage.ru_utime - start_usage.ru_stime
        table.append((target, wall, cpu))
        if status:
            break
    outcome = f"{targets[len(table) - 1]} failed" if status else "all passed"
    table.append((outcome, sum(row[1] for row in table), sum(row[2] for row in table)))
    print(f"{'stage':24}{'seconds':>9}{'CPU seconds':>13}")
    for name, wall, cpu in table:
        print(f"{name:24}{wall:9.1f}{cpu:13.1f}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
