"""Defines hooks of the documentation site (mkdocs.yml), which add pages, replace links to files
outside docs, and warn if a page loads external files."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
README = "overview.md"
LOG = logging.getLogger("mkdocs.hooks.docs_site")  # a warning ends `mkdocs build --strict`

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(#[^)]*)?\)")
_OPERATOR = re.compile(r"\[([^\]]+)\]\((ops/\w+\.md)\)")
_ROLE = re.compile(r":\w+:(?=<code>)")
_EXTERNAL = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//""")


def on_config(config: Any) -> Any:
    """Adds the version to each page, and the operators in docs/README.md to the reference."""
    document = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [{names: page} for names, page in _OPERATOR.findall(document)]
    (reference,) = (part["Reference"] for part in config.nav if "Reference" in part)
    reference.append({"Operators": pages})
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "([^"]+)"', project, re.MULTILINE)
    config.site_name += f" {version[1]}" if version else ""
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the repository's README as the first page. docs/README.md, the list of pages, becomes
    documentation.html."""
    from mkdocs.structure.files import File  # not needed by this module's tests

    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!docs/|\w+:)", "](../", text).replace("](docs/", "](")
    files.get_file_from_path("README.md").dest_uri = "documentation.html"
    overview = File.generated(config, README, content=text)
    overview.dest_uri, overview.name = "index.html", "index"
    files.append(overview)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replaces links to files outside docs with the files' names, because the site does not contain
    these files."""
    folder = (REPOSITORY / "docs" / page.file.src_uri).parent

    def replace_link(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(REPOSITORY / "docs"):
            return match[0]
        if target == REPOSITORY / "README.md":
            prefix = "../" * page.file.src_uri.count("/")
            return f"[{match[1]}]({prefix}{README}{match[3] or ''})"
        if not target.exists():
            LOG.warning("%s: links to %s, which does not exist", page.file.src_uri, match[2])
        name = f"`{target.relative_to(REPOSITORY)}`"
        return name if match[1].strip("`") in name else f"{match[1]} ({name})"

    return _LINK.sub(replace_link, markdown)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Warns if a page loads external files, and removes the roles of docstrings."""
    for tag in _EXTERNAL.findall(output):
        LOG.warning("%s: loads an external file: %s", page.file.src_uri, tag)
    return _ROLE.sub("", output)
