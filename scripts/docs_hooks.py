"""Hooks that mkdocs calls while it builds the site. They add the generated parts of pages and the interactive page."""

from __future__ import annotations

from typing import Any

import docs_parts  # scripts/docs.sh adds this folder to PYTHONPATH
from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Add the files that are made during the build."""
    for name, content in docs_parts.FILES.items():
        files.append(File.generated(config, name, content=content()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the generated parts into a page."""
    return docs_parts.filled(markdown)
