"""What mkdocs asks while it builds the site: parts of pages that code writes, and the page of schedules."""

from __future__ import annotations

from typing import Any

import docs_parts  # scripts/docs.sh puts this folder on the path
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Add what is made at build."""
    for name, content in docs_parts.FILES.items():
        files.append(File.generated(config, name, content=content()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put generated parts in."""
    return docs_parts.filled(markdown)
