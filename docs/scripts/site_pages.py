"""MkDocs hook: adds the generated pages, drawings and plots to the site."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import diagrams
import figures
import references


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the plugins into the navigation."""
    plugins = [f"plugins/{name}.md" for name in references.plugin_readmes()]
    config.nav = [_filled(item, plugins) for item in config.nav or []]
    return config


def _filled(item: Any, plugins: list[str]) -> Any:
    if isinstance(item, dict):
        ((title, inner),) = item.items()
        if inner == "PLUGINS":
            return {title: ["matrix.md", "models.md", *plugins]}
        if isinstance(inner, list):
            return {title: [_filled(x, plugins) for x in inner]}
    return item


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, text in references.pages().items():
        files.append(File.generated(config, page, content=text))
    for name, svg in {**diagrams.drawings(), **figures.figures()}.items():
        files.append(File.generated(config, f"images/{name}", content=svg))
    return files
