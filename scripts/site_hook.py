"""Hook of mkdocs (mkdocs.yml): adds the pages that are generated from the code, cli.md and
protocol.md, and turns links that leave docs/ into ones that work on the site."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import docs

_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """With the generated pages."""
    for name, lines in docs.SITE_PAGES.items():
        files.append(File.generated(config, name, content="\n".join(lines())))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A link to protos/ leads to protocol.md; of another one that leaves docs/ the text stays."""
    folder = posixpath.dirname(page.file.src_uri)

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not target.startswith("../"):
            return link[0]
        if target.startswith("../protos/"):
            return f"[{link[1]}]({posixpath.relpath('protocol.md', folder or '.')})"
        return link[1]

    return _LINK.sub(on_site, markdown)
