"""Mutants of the rules by which pages are found again."""

from __future__ import annotations

from tests.machines.prefixes import run_again, run_prefixes
from tests.machines.quotas import run_quota_scene
from tests.mutants.lifecycle import LifecycleMutant
from topkv_prefixes import prefixes
from topkv_prefixes.pages import PrefixPages, page_keys

_release = PrefixPages.release
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
    """Prompts may be found to their last token."""
    return _keys(self, [*tokens, *[0] * self.tail], salt)


def without_tenant(self, tokens, salt):
    """Keys of all tenants are alike."""
    return page_keys(tokens, self.requests.config.page_tokens, salt)


def lost_by(choose):
    """Make a ``release`` with another choice of the pages that are lost above a quota."""

    def release(self, pages):
        pages, limit_of = list(pages), self.limit_of
        tenants = {self.tenant_of(self._key_of[each]) for each in pages if each in self._key_of}
        self.limit_of = lambda tenant: None
        freed = _release(self, pages)
        self.limit_of = limit_of
        for tenant in tenants:
            if (limit := limit_of(tenant)) is not None:
                self._evict(choose(self, tenant, limit))
        return freed

    return release


def of_anybody(self, tenant, limit):
    return list(self._kept)[: max(0, self.kept_for(tenant) - limit)]


def newest(self, tenant, limit):
    return list(self._kept_for.get(tenant, ()))[limit:]


def with_what_is_held(self, tenant, limit):
    """Pages of running requests count for a quota too."""
    all_of_it = sum(self.tenant_of(key) == tenant for key in self._key_of.values())
    return list(self._kept_for.get(tenant, ()))[: max(0, all_of_it - limit)]


MUTANTS = [
    LifecycleMutant(
        "tenants with quotas find each other's pages",
        *(prefixes.Prefixes, "_keys_of", without_tenant, run_quota_scene),
    ),
    LifecycleMutant(
        "nobody has a quota",
        *(prefixes.Prefixes, "_limit_of", lambda self, tenant: None, run_quota_scene),
    ),
    LifecycleMutant(
        "a tenant above its quota takes the pages of others",
        *(PrefixPages, "release", lost_by(of_anybody), run_quota_scene),
    ),
    LifecycleMutant(
        "a tenant above its quota loses what was used last",
        *(PrefixPages, "release", lost_by(newest), run_quota_scene),
    ),
    LifecycleMutant(
        "what running requests hold counts for a quota",
        *(PrefixPages, "release", lost_by(with_what_is_held), run_quota_scene),
    ),
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
