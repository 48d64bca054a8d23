"""Mutants of the rules by which pages are found again."""

from __future__ import annotations

from tests.mutants.lifecycle import LifecycleMutant
from topkv import prefixes
from topkv.kv.prefix import PrefixPages, page_keys
from topkv.testing.machines.prefixes import run_again, run_prefixes

_keys = prefixes.Prefixes._keys


def stay_found(self, pages):
    """Pages that are about to be written are found as they were."""


def without_salt(tokens, page_tokens, salt):
    return page_keys(tokens, page_tokens, b"")


def by_page(tokens, page_tokens, salt):
    """The key of a page is that of its own tokens."""
    whole = range(0, len(tokens) // page_tokens * page_tokens, page_tokens)
    return [page_keys(tokens[at : at + page_tokens], page_tokens, salt)[0] for at in whole]


def all_of_it(self, tokens, salt):
    """A prompt may be found to its last token."""
    return _keys(self, [*tokens, *[0] * self.tail], salt)


MUTANTS = [
    LifecycleMutant(
        "a page that its only holder writes is still found",
        *(PrefixPages, "withdraw", stay_found, run_prefixes),
    ),
    LifecycleMutant(
        "tenants find each other's pages",
        *(prefixes, "page_keys", without_salt, run_prefixes),
    ),
    LifecycleMutant(
        "pages are found whatever came before them",
        *(prefixes, "page_keys", by_page, run_prefixes),
    ),
    LifecycleMutant(
        "nothing is left to compute of a prompt",
        *(prefixes.Prefixes, "_keys", all_of_it, run_again),
    ),
]
