"""A deliberate fault, and the text form of a list of them."""

from __future__ import annotations

from dataclasses import dataclass

from twins import ROOT


@dataclass(frozen=True)
class Mutant:
    file: str
    """From the project's root."""
    what: str
    old: str
    """Text that occurs there exactly once."""
    new: str
    op: str = ""
    """The operator on whose samples a CUDA kernel is tried."""

    @property
    def name(self) -> str:
        return f"{self.op or self.file.rpartition('/')[2]}: {self.what}"

    def changed(self) -> str:
        """
        Raises:
            ValueError: the old text stands elsewhere as well, or nowhere.
        """
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its old text stands at {text.count(self.old)} places")
        return text.replace(self.old, self.new)


def parse(text: str) -> list[Mutant]:
    """The faults of a list. A line ``@ file``, or ``@ file op op``, begins those of a file. One is

        what: old => new

    or ``what``, then the lines of the old text, each behind ``- ``, and of the new behind ``+ ``.
    """
    found: list[Mutant] = []
    for part in text.split("\n@ ")[1:]:
        header, *lines = part.splitlines()
        file, *ops = header.split()
        faults: dict[str, dict[str, list[str]]] = {}
        what = ""
        for line in filter(None, lines):
            if line[0] in "-+":
                faults[what][line[0]].append(line[2:])
                continue
            what, _, change = line.partition(": ")
            old, _, new = change.partition(" =>")
            faults[what] = {"-": [old], "+": [new[1:]]} if change else {"-": [], "+": []}
        for what, texts in faults.items():
            old, new = ("\n".join(texts[sign]) for sign in "-+")
            found += [Mutant(file, what, old, new, op) for op in ops or [""]]
    return found
