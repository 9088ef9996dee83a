"""Takes vLLM's files along to a machine without a network.

    python -m tools.gpu.peers FOLDER_THAT_CONTAINS_VLLM

Copies the few files that the peers are run from, and the name and version of where they come from,
into build/gpu-peers, which git ignores. They are vLLM's: they stay out of the repository.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.bench.gpu.vllm_files import FILES
from tools.gpu.stages import PEERS


def copy(source: Path, target: Path) -> list[Path]:
    """
    Returns:
        The copies.

    Raises:
        FileNotFoundError: a file that is not there.
    """
    found = [*FILES, *(f.relative_to(source) for f in source.glob("vllm*.dist-info/METADATA"))]
    copies = []
    for file in found:
        copies.append(target / file)
        copies[-1].parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, copies[-1])
    return copies


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.peers", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?", default=PEERS)
    given = parser.parse_args(arguments)
    try:
        print(*copy(given.source, given.target), sep="\n")
    except FileNotFoundError as error:
        print(f"tools.gpu.peers: {error.filename} is missing", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
