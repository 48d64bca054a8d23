"""Entry of the plugin, through which topkv finds the algorithm ``pqcache``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, le

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import BONUS, FLOATS, RANKED


@frozen
class PQParams:
    """Parameters.

    Attributes:
        subvectors: m, parts of a key; divides the head dim.
        bits: of a code, which is a byte.
        segment: prompt tokens of a codebook; a part of a prompt is half of it or more.
        window: decoded tokens of a codebook.
        iterations: most steps of k-means.
        seed: of the first centroids.
        sink_units: first tokens, which every selection holds; None for a twelfth of it, 4 at most.
        recent_units: newest closed tokens, likewise; None for a sixth, 8 at most.
        sticky: bonus of tokens that are on the device, in natural logarithms.
    """

    subvectors: int = field(default=4, validator=ge(1))
    bits: int = field(default=6, validator=[ge(1), le(8)])
    segment: int = field(default=8192, validator=ge(1))
    window: int = field(default=1024, validator=ge(1))
    iterations: int = field(default=10, validator=ge(0))
    seed: int = field(default=0, validator=ge(0))
    sink_units: int | None = None
    recent_units: int | None = None
    sticky: float = field(default=0.0, validator=BONUS)

    def __attrs_post_init__(self) -> None:
        if self.segment < 2 * self.window:
            raise ValueError(
                f"segment must be at least twice the window, got {self.segment} and "
                f"{self.window}; a part of a prompt is half a segment or more, and has to be "
                "worth a codebook"
            )


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="pqcache",
            kind="algorithm",
            factories={
                "reference": "topkv_pqcache.algorithm:PQCache",
                "triton": "topkv_pqcache.launch:PQCacheTriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head", "shared"),
                queries=8,
                dtypes=FLOATS,
                # Not scale_free: a mean of softmaxes. Not exact_update: prompts and windows of
                # decoded tokens train other codebooks.
                traits=("attends", "head_equivariant", *RANKED),
            ),
            # Rows of scores are tokens; topkv-triton-topk is made for rows so long.
            defaults={"unit": 1, "scope": "kv_head", "dense_layers": (0, 1), "topk": "pivot"},
            parameters=PQParams,
        )
    ]
