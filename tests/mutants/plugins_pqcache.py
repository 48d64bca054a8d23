"""PQCache with one bug each, and the test of the kit, or of the plugin, that sees it."""

from __future__ import annotations

import torch
from attrs import evolve

from plugins.pqcache.tests import conftest, test_codes, test_cuts, test_settle
from plugins.pqcache.tests import test_conformance as kit
from tests.mutants import plugins
from topkv import hookimpl
from topkv_pqcache import kmeans, reference
from topkv_pqcache.algorithm import PQCache, State
from topkv_pqcache.launch import PQCacheTriton


class Swapped(PQCache):
    """Runs with one function of ``reference`` or ``kmeans`` in another's place."""

    owner, name = reference, ""

    @staticmethod
    def broken(*args):
        raise NotImplementedError

    def _swapped(self, call, *args):
        whole = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.broken)
        try:
            return call(*args)
        finally:
            setattr(self.owner, self.name, whole)

    def train(self, keys):
        return self._swapped(super().train, keys)

    def encode(self, layer, slot, book, start, keys):
        self._swapped(super().encode, layer, slot, book, start, keys)

    def score(self, q, kept):
        return self._swapped(super().score, q, kept)


_table = reference.table


class LargestProduct(Swapped):
    """A code is the centroid of the largest product, however long it is."""

    name = "nearest"

    @staticmethod
    def broken(x, centroids):
        return (x[..., None, :] * centroids.float()).sum(-1).argmax(-1).to(torch.uint8)


class DropsLastSubvector(Swapped):
    """The table of the last sub-vector is left out of the sum."""

    name = "table"

    @staticmethod
    def broken(q, centroids):
        made = _table(q, centroids)
        made[..., -1, :] = 0
        return made


class FirstKeysForCentroids(Swapped):
    """Begins with the first keys, alike or not, instead of drawing them by distance."""

    owner, name = kmeans, "first_centroids"

    @staticmethod
    def broken(x, count, seed):
        return x[:, torch.arange(count) % x.shape[1]]


class NewestCodebookForAll(PQCache):
    """Scores every token by the newest codebook."""

    def score(self, q, kept):
        newest = kept["book"].amax(1, keepdim=True).expand_as(kept["book"])
        return super().score(q, {**kept, "book": newest})


class OpenByTheLastCodebook(PQCache):
    """Scores decoded tokens by the codebook of the prompt, as the authors' code does."""

    def score(self, q, kept):
        codes, keys, centroids = kept["codes"].clone(), kept["keys"], kept["centroids"]
        for row, book in enumerate(kept["book"].amax(1).tolist()):
            places = torch.arange(codes.shape[2], device=q.device) % self.places
            own = reference.encode(keys[row][:, places].transpose(0, 1), centroids[row, :, book])
            codes[row] = torch.where(kept["open"][row, :, None], own.transpose(0, 1), codes[row])
        none = torch.zeros_like(kept["open"])
        return super().score(q, {**kept, "codes": codes, "open": none})


class NeverCloses(PQCache):
    """Windows of decoded tokens get no codebook."""

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        if layer.pools["state"][slot, State.CODED] == 0:
            super().settle(layer, slot, since, length, history)


class ClosesEveryTurn(PQCache):
    """Every prompt gets a codebook, however short it is."""

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        self.window, window = 1, self.window
        try:
            super().settle(layer, slot, since, length, history)
        finally:
            self.window = window


class ForgetsTheOpenOnes(PQCache):
    """A codebook is trained on what is new alone, and what was open before gets no code."""

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        state = layer.pools["state"][slot]
        if length - int(state[State.CODED]) >= self.window:
            state[State.CODED] = since
        super().settle(layer, slot, since, length, history)


class PlacesOfOneWindow(PQCache):
    """Has room for the keys of one window, and not for what a prompt leaves open besides."""

    def __init__(self, setup):
        super().__init__(setup)
        self.places = min(self.window, self.places)


class LeavesASmallPart(PQCache):
    """Cuts a prompt at multiples of a segment, so that its end trains a codebook of its own."""

    def _edges(self, first, length, books):
        return [*range(first, length, self.segment), length]


class KeepsCodebooks(PQCache):
    """A codebook stays when all of its tokens are taken back."""

    @hookimpl
    def truncated(self, layer, slot, length):
        layer.pools["state"][slot, State.CODED].clamp_(max=length)


class CodesBehindTheEnd(PQCache):
    """Counts tokens that were cut off as tokens with codes."""

    @hookimpl
    def truncated(self, layer, slot, length):
        coded = layer.pools["state"][slot, State.CODED].clone()
        super().truncated(layer, slot, length)
        layer.pools["state"][slot, State.CODED] = coded


class ForgetsLeftOnes(PQCache):
    """A cut takes the codebook along that it falls into."""

    @hookimpl
    def truncated(self, layer, slot, length):
        state, starts = layer.pools["state"][slot], layer.pools["starts"][slot]
        books = int(state[State.BOOKS])
        super().truncated(layer, slot, length)
        if int((starts[:books] < length).sum()) == books > 1:
            state[State.BOOKS] = books - 1


class TakesTheLastPlaceAgain(PQCache):
    """Where places run out, the last codebook is trained anew, whatever uses it."""

    def _close(self, layer, slot, books, pieces):
        return super()._close(layer, slot, min(books, self.books - 1), pieces)


class CodesOfThePage(PQCache):
    """Codes are those of a page, whoever holds it: one that settles changes them for its twin."""

    def encode(self, layer, slot, book, start, keys):
        super().encode(layer, slot, book, start, keys)
        table, codes = layer.step.page_table, layer.pools["codes"]
        for other in range(len(codes)):
            pages = (table[other] == table[slot]).repeat_interleave(self.group.page_tokens)
            codes[other][:, pages] = codes[slot][:, pages]


class NeverIterates(PQCache):
    """Keys that are drawn first stay the centroids."""

    def train(self, keys):
        self.params, params = evolve(self.params, iterations=0), self.params
        try:
            return super().train(keys)
        finally:
            self.params = params


class StridedSubvectors(PQCache):
    """Trains on every m-th channel instead of on neighbours."""

    def train(self, keys):
        strided = keys.unflatten(-1, (-1, self.subvectors)).mT.flatten(-2)
        return super().train(strided)


class HeadsOfNeighbours(PQCache):
    """A prompt's codes are those of the neighbouring kv-head."""

    def encode(self, layer, slot, book, start, keys):
        super().encode(layer, slot, book, start, keys.roll(1, 1))


class PaddedRowsWrite(PQCache):
    """Rows that append nothing write codes all the same."""

    @hookimpl
    def update(self, layer, k, v):
        step = layer.step
        layer.step = evolve(step, appended=torch.ones_like(step.appended))
        try:
            super().update(layer, k.nan_to_num(), v)
        finally:
            layer.step = step


class MeanQuery(PQCache):
    """Averages the queries of a group before they are scored."""

    def lane_scores(self, layer, q):
        grouped = q.unflatten(1, (self.model.num_kv_heads, -1))
        mean = grouped.float().mean(2, keepdim=True).to(q.dtype)
        return super().lane_scores(layer, mean.expand_as(grouped).flatten(1, 2))


class ForgetsRecent(PQCache):
    """Scores the last tokens like all others."""

    def __init__(self, setup):
        super().__init__(setup)
        self.recent_units = 0


class RowForSlot(PQCache):
    """Looks codes and codebooks up by the number of the row, not by its slot."""

    def lane_scores(self, layer, q):
        step, pools = layer.step, layer.pools
        order = torch.arange(len(pools["codes"]), device=q.device)
        live = step.slots >= 0
        order[step.slots[live].long()] = torch.arange(step.batch, device=q.device)[live]
        layer.pools = {name: pool[order] for name, pool in pools.items()}
        try:
            return super().lane_scores(layer, q)
        finally:
            layer.pools = pools


class KernelUnscaled(PQCacheTriton):
    """The table gets another logit scale: the heads of a group weigh otherwise."""

    def __init__(self, setup):
        super().__init__(evolve(setup, model=evolve(setup.model, scale=64.0)))


class KernelBooksLate(PQCacheTriton):
    """The kernel that scores lets a codebook begin one token late."""

    def lane_scores(self, layer, q):
        pools = layer.pools
        layer.pools = {**pools, "starts": pools["starts"] + 1}
        try:
            return super().lane_scores(layer, q)
        finally:
            layer.pools = pools


class KernelSkipsTheLastTile(PQCacheTriton):
    """The kernel that scores leaves out the last tile of each block."""

    def __init__(self, setup):
        super().__init__(setup)
        self.scoring = [{**each, "TILE": each["TILE"] // 2} for each in self.scoring]


class KernelCodesByTheFirst(PQCacheTriton):
    """The kernel that encodes takes the first codebook for every segment."""

    def encode(self, layer, slot, book, start, keys):
        super().encode(layer, slot, 0, start, keys)


class KernelKeepsHalf(PQCacheTriton):
    """The kernel that follows decoded tokens keeps half of the channels."""

    def __init__(self, setup):
        super().__init__(setup)
        self.following = {**self.following, "BLOCK_D": self.following["BLOCK_D"] // 2}


class KernelOpensLate(PQCacheTriton):
    """The kernel that scores takes the first open token for one with a code."""

    def lane_scores(self, layer, q):
        pools = layer.pools
        later = torch.zeros_like(pools["state"])
        later[:, State.CODED] = 1
        layer.pools = {**pools, "state": pools["state"] + later}
        try:
            return super().lane_scores(layer, q)
        finally:
            layer.pools = pools


ANYWHERE, INTERPRETED = ("cpu", "interpret"), ("interpret",)
of_kit = plugins._kit("pqcache", PQCacheTriton, kit.OPTIONS)
own = plugins._own(
    PQCacheTriton,
    subject=plugins._subject("pqcache", conftest.OPTIONS),
    name=lambda on: on.name,
)
EXACT = (test_codes, "few_different_keys_are_kept_exactly_and_so_is_the_top_k")
SCORES = (test_codes, "kernels_score_what_the_formula_says")
BITS = (test_codes, "kernels_write_what_the_reference_writes")
WINDOW = (test_settle, "a_full_window_of_decoded_tokens_gets_a_codebook_of_its_own")
PARTS = (test_settle, "a_prompt_is_cut_into_equal_parts_of_half_a_segment_or_more")
TURNS = (test_settle, "short_turns_stay_open_until_they_are_a_window")
MOST = (test_settle, "most_open_tokens_there_can_be")
DRIFT = (
    test_settle,
    "decoded_tokens_that_drift_away_are_found_in_an_open_window_and_in_a_full_one",
)
TRAINED = (test_settle, "a_codebook_is_what_kmeans_makes_of_each_sub_vector")
CUT = (test_cuts, "truncation_forgets_codebooks_of_which_no_token_is_left")
BACK = (test_cuts, "a_window_that_is_rolled_back_leaves_nothing")
LEFT = (test_cuts, "a_codebook_stays_while_one_of_its_tokens_is_left")
FULL = (test_cuts, "where_places_run_out_tokens_go_by_the_last_codebook")
FORK = (test_cuts, "a_fork_in_the_middle_of_a_window_changes_nothing_of_the_other")

MUTANTS = [
    own(LargestProduct, *EXACT),
    of_kit(DropsLastSubvector, plugins.ORACLE),
    own(FirstKeysForCentroids, *EXACT),
    own(NeverIterates, *TRAINED),
    own(StridedSubvectors, *TRAINED),
    of_kit(NewestCodebookForAll, plugins.ORACLE),
    of_kit(OpenByTheLastCodebook, plugins.FOUND),
    own(OpenByTheLastCodebook, *DRIFT, shift=3.0),
    own(NeverCloses, *WINDOW, ANYWHERE),
    own(ClosesEveryTurn, *TURNS),
    own(ForgetsTheOpenOnes, *TURNS),
    own(PlacesOfOneWindow, *MOST, prompts=(8, 7), books=2),
    own(LeavesASmallPart, *PARTS, length=21),
    own(KeepsCodebooks, *BACK, ANYWHERE),
    own(CodesBehindTheEnd, *CUT, length=19),
    own(ForgetsLeftOnes, *LEFT),
    own(TakesTheLastPlaceAgain, *FULL),
    own(CodesOfThePage, *FORK, settled=True),
    of_kit(HeadsOfNeighbours, "needle_in_a_prompt", ANYWHERE),
    of_kit(PaddedRowsWrite, "rows_that_append_nothing_write_nothing", ANYWHERE),
    of_kit(MeanQuery, "every_query_head_finds_its_needle", ANYWHERE),
    of_kit(ForgetsRecent, plugins.PROMISED, ANYWHERE),
    of_kit(RowForSlot, "slots_and_host_pages_do_not_matter", ANYWHERE),
    of_kit(KernelUnscaled, plugins.KERNELS, INTERPRETED),
    own(KernelCodesByTheFirst, *PARTS, INTERPRETED, length=41),
    own(KernelKeepsHalf, *BITS, INTERPRETED),
    own(KernelBooksLate, *SCORES, INTERPRETED, scope="kv_head", group=3, bits=6),
    own(KernelOpensLate, *SCORES, INTERPRETED, scope="shared", group=1, bits=1),
    own(KernelSkipsTheLastTile, *SCORES, INTERPRETED, scope="kv_head", group=1, bits=1),
]
