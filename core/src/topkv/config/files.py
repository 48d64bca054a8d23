"""Reading a configuration file.

Keys that are written twice, YAML aliases and endless nesting are refused, so that nothing is lost
without a word or grows when it is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from topkv.errors import ConfigError
from topkv.messages import shown

_MERGE = "tag:yaml.org,2002:merge"


def read(path: Path) -> Any:
    """Parse a JSON (``.json``) or YAML (``.yaml``, ``.yml``) file into plain Python objects.

    Raises:
        OSError: it cannot be read.
        ValueError: it is neither, or has duplicate keys, aliases or endless nesting.
        ConfigError: pyyaml is not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"its name must end in .yaml, .yml or .json, got {suffix!r}")
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text, object_pairs_hook=_once) if suffix == ".json" else _yaml(text)
    except RecursionError:
        raise ValueError("it is nested too deeply for any key") from None


def _once(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A mapping of pairs with distinct keys."""
    made: dict[Any, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {shown(key)} is written twice; remove one of them")
        made[key] = value
    return made


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        fix = "pip install 'topkv[cli]' (or pyyaml), or write the configuration as JSON"
        raise ConfigError("a YAML configuration needs pyyaml", [fix]) from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                # A few lines of aliases of aliases stand for gigabytes.
                raise ValueError(
                    f"the alias *{shown(event.anchor)[1:-1]} in line {event.start_mark.line + 1} "
                    "is refused, as all aliases are; write the value out"
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if isinstance(node, yaml.MappingNode):
                # Keys that are no scalars cannot be hashed, and are refused for that.
                keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
                _once([(self.construct_object(key), None) for key in keys if key.tag != _MERGE])
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
