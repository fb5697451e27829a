"""What turns the files of this folder, and those at the root of the project, into the pages of a site.

The files are written to be read where they lie, and link to each other and to source files. On the site the pages at
the root stand beside the others, and a link to a source file, which is no page, is its text alone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
AT_ROOT = {"README.md": "index.md"} | {name: name for name in ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")}
"""Path in the project -> page of the site."""
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *```.*?^ *```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages at the root of the project."""
    for source, page in AT_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links between files of the project into links between pages of the site."""
    folder = "" if page.file.src_uri in AT_ROOT.values() else "docs"
    parts = FENCE.split(markdown)
    return "".join(part if number % 2 else _with_links_of_site(part, folder) for number, part in enumerate(parts))


def _with_links_of_site(text: str, folder: str) -> str:
    return LINK.sub(lambda found: _link(found[1], found[2], folder), text)


def _link(label: str, target: str, folder: str) -> str:
    """One link of a file in a folder of the project, as the page has it."""
    path, _hash, anchor = target.partition("#")
    label = _with_links_of_site(label, folder)
    if not path or ":" in path:
        return f"[{label}]({target})"
    found = posixpath.normpath(posixpath.join(folder, path))
    if found in AT_ROOT:
        page = AT_ROOT[found]
    elif found.startswith("docs/") and (ROOT / found).is_file() and not found.endswith(".py"):
        page = found.removeprefix("docs/")
    else:
        return label
    return f"[{label}]({page}{'#' + anchor if anchor else ''})"
