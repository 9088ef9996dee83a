"""Each `order<...>` of the AscendC kernels left out: read from their sources, so that the list is
complete. The twin's samples must notice, or the kernel does not need it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from repo.verify.mutants.mutant import ROOT, Mutant

_ORDER = re.compile(r"^.*\border<AscendC::HardEvent::(\w+)>\(\);\n", re.MULTILINE)


def without_each_order(file: Path) -> list[Mutant]:
    text = file.read_text()
    seen: Counter[str] = Counter()
    found = []
    for match in _ORDER.finditer(text):
        begin = match.start()
        while text.count(text[begin : match.end()]) > 1:  # a fault's old text has one place
            begin = text.rindex("\n", 0, begin - 1) + 1
        event = match[1]
        seen[event] += 1
        kept = text[begin : match.start()] + match[0].replace(match[0].strip(), ";")
        found.append(
            Mutant(
                str(file.relative_to(ROOT)),
                f"{event} {seen[event]} left out",
                text[begin : match.end()],
                kept,
            )
        )
    return found


MUTANTS = [
    mutant
    for file in sorted((ROOT / "csrc" / "ascendc").iterdir())
    if file.suffix in {".h", ".cpp"}
    for mutant in without_each_order(file)
]
