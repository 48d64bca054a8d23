"""Entry of the plugin, through which topkv finds the algorithm ``clusterkv``."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv_authoring.parameters import FLOATS

SPARE = 8
"""Further windows that places are kept for: the end of every prompt makes clusters of its own."""


@frozen
class ClusterParams:
    """Parameters, and what follows from them.

    Attributes:
        tokens_per_cluster: tokens of a cluster, on average.
        window: tokens that decode clusters at a time.
        segment: prompt tokens that are clustered at a time.
        sinks: first tokens, which are always attended.
        iterations: most steps of k-means.
        seed: of the first centroids.
    """

    tokens_per_cluster: int = field(default=16, validator=ge(1))
    window: int = field(default=320, validator=ge(1))
    segment: int = field(default=8192, validator=ge(1))
    sinks: int = field(default=16, validator=ge(0))
    iterations: int = field(default=10, validator=ge(1))
    seed: int = field(default=0, validator=ge(0))

    def __attrs_post_init__(self) -> None:
        if self.segment < self.window:
            raise ValueError(
                f"segment must be at least window, got {self.segment} and {self.window}"
            )

    def aligned(self, length: int) -> int:
        """The end of the last full segment of a request; ``sinks`` if there is none."""
        return max(length // self.segment * self.segment, self.sinks)

    def clusters(self, tokens: int) -> int:
        return -(-tokens // self.tokens_per_cluster)

    def max_clusters(self, max_tokens: int) -> int:
        """Clusters of a request of full windows, and of ``SPARE`` windows more.

        A segment that is not of whole clusters makes one more than its tokens would in windows.
        """
        windows = max(max_tokens - self.sinks, 0) // self.window + SPARE
        return windows * self.clusters(self.window) + max_tokens // self.segment

    def pending(self, ring_tokens: int) -> int:
        """P: a window that decode fills, a rollback, and a window of slack.

        A chunk finds as many tokens of its segment that came before it.
        """
        return 2 * self.window + ring_tokens


@hookimpl
def topkv_register_algorithms() -> list[PluginEntry]:
    return [
        PluginEntry(
            name="clusterkv",
            kind="algorithm",
            factories={
                "reference": "topkv_clusterkv.algorithm:ClusterKV",
                "triton": "topkv_clusterkv.launch:ClusterKVTriton",
            },
            hook_api=(3, 0),
            capabilities=Capabilities(
                units=(1, 1),
                scopes=("kv_head",),
                dtypes=FLOATS,
                # Not scale_free: a mean of softmaxes. Not exact_update: decoded tokens are
                # clustered by windows. Not low_ties: the lower of two tied clusters may hold
                # the higher tokens.
                traits=("attends", "nested", "head_equivariant", "incremental", "value_free"),
            ),
            defaults={"unit": 1, "scope": "kv_head", "dense_layers": (0, 1)},
            parameters=ClusterParams,
        )
    ]
