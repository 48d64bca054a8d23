"""Bugs of the other algorithms, and the test of the kit, or of the plugin, that sees each.

Properties of one algorithm, such as the channels that make a label or the members that a cut
cluster keeps, are tested by the plugin's own tests: they run with the broken class in place.
"""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from plugins.clusterkv.tests import test_conformance as clusterkv_kit
from plugins.clusterkv.tests import test_decode as clusterkv_decode
from plugins.clusterkv.tests import test_properties as clusterkv_properties
from plugins.clusterkv.tests import test_selection as clusterkv_selection
from plugins.double_sparsity.tests import conftest as double_sparsity
from plugins.double_sparsity.tests import test_channels, test_labels
from plugins.double_sparsity.tests import test_conformance as double_sparsity_kit
from plugins.double_sparsity.tests import test_properties as sparsity_properties
from plugins.double_sparsity.tests import test_selection as sparsity_selection
from plugins.keydiff.tests import test_conformance as keydiff_kit
from plugins.keydiff.tests import test_pages as keydiff_pages
from plugins.pariskv.tests import test_conformance as pariskv_kit
from plugins.residual.tests import test_conformance as residual_kit
from plugins.residual.tests import test_estimate as residual_estimate
from plugins.rocketkv.tests import test_conformance as rocketkv_kit
from plugins.rocketkv.tests import test_decode as rocketkv_decode
from plugins.rocketkv.tests import test_scores as rocketkv_scores
from plugins.rocketkv.tests import test_votes as rocketkv_votes
from plugins.skip_softmax.tests import test_conformance as skip_kit
from plugins.skip_softmax.tests import test_decode as skip_decode
from plugins.snapkv.tests import test_conformance as snapkv_kit
from plugins.snapkv.tests import test_properties as snapkv_properties
from plugins.snapkv.tests import test_votes
from plugins.streaming_llm.tests import test_conformance as streaming_kit
from plugins.top_p.tests import test_conformance as top_p_kit
from plugins.top_p.tests import test_keys as top_p_keys
from plugins.top_p.tests import test_selection as top_p_selection
from plugins.triton_attention.tests import test_skip
from tests.mutants import plugins_clusterkv as clusterkv
from tests.mutants import plugins_double_sparsity as sparsity
from tests.mutants import plugins_keydiff as keydiff
from tests.mutants import plugins_pariskv as paris
from tests.mutants import plugins_prompt as prompt
from tests.mutants import plugins_residual as residual
from tests.mutants import plugins_rocketkv as rocket
from tests.mutants import plugins_skip_softmax as skip
from tests.mutants import plugins_top_p as top_p
from tests.mutants.harness import Mutant, mutated, name_of
from tests.mutants.plugin_harness import _kit, _own, _stage, _subject
from topkv_clusterkv.launch import ClusterKVTriton
from topkv_double_sparsity.launch import DoubleSparsityTriton
from topkv_keydiff.kernels import KeyDiffKernels
from topkv_pariskv.launch import ParisKVTriton
from topkv_residual.launch import ResidualTriton
from topkv_rocketkv.launch import RocketKVTriton
from topkv_skip_softmax.stage import SkipSoftmax
from topkv_snapkv.kernels import SnapKVTriton
from topkv_streaming_llm.launch import StreamingLLMTriton
from topkv_testing.algorithms import AlgorithmOptions
from topkv_testing.kit import subject_of
from topkv_testing.stages import OptionTests
from topkv_top_p.launch import TopPTriton
from topkv_triton_attention.launch import SkippingDecoder

ANYWHERE = ("cpu", "interpret")


sparse = _kit("double_sparsity", DoubleSparsityTriton, double_sparsity_kit.options({}))
packed = _kit(
    "double_sparsity",
    DoubleSparsityTriton,
    double_sparsity_kit.options({"label": st.just("int4")}),
)
cluster = _kit("clusterkv", ClusterKVTriton, clusterkv_kit.OPTIONS)
coded = _kit("pariskv", ParisKVTriton, pariskv_kit.OPTIONS)
rocket_kit = _kit("rocketkv", RocketKVTriton, rocketkv_kit.OPTIONS)
snap = _kit("snapkv", SnapKVTriton, snapkv_kit.OPTIONS)
stream = _kit("streaming_llm", StreamingLLMTriton, streaming_kit.OPTIONS)
of_sparse = _own(DoubleSparsityTriton, bench=lambda on: double_sparsity.Bench)
of_cluster = _own(ClusterKVTriton, subject=_subject("clusterkv", clusterkv_selection.OPTIONS))
of_rocket = _own(RocketKVTriton, subject=_subject("rocketkv", AlgorithmOptions(units=96)))
of_bounds = _own(RocketKVTriton, subject=_subject("rocketkv", AlgorithmOptions(units=40)))
in_chat = _own(RocketKVTriton, tier=lambda on: on)
of_snap = _own(SnapKVTriton, subject=_subject("snapkv", AlgorithmOptions(units=48)))
stays = _own(SnapKVTriton, subject=_subject("snapkv", snapkv_properties.OPTIONS))
of_top_p = _own(
    TopPTriton,
    subject=lambda on: subject_of(top_p_kit.ENTRY, "stage", on, top_p_kit.OPTIONS),
    name=lambda on: on.name,
)
of_residual = _own(ResidualTriton)
of_keydiff = _own(KeyDiffKernels)


of_skip = _own(SkippingDecoder, where=lambda on: on)
of_skip_stage = _own(SkipSoftmax)

SHARE = (top_p_selection, "what_is_kept_has_the_share_p_and_no_more_units_than_that_takes")
FORMULA = (test_skip, "what_is_left_out_and_what_is_attended_are_those_of_the_formula")
CHAIN = (skip_decode, "a_step_attends_to_what_is_left_of_its_selection")
EQUALS = (top_p_selection, "of_equal_units_the_lowest_are_kept")
NEUTRAL = (top_p_selection, "with_p_of_1_candidates_are_left_as_they_are")
BLOCKS = (top_p_selection, "candidates_of_many_blocks")
DECODED = "decode_builds_what_a_prompt_builds"
LEFT = "what_is_left_is_what_the_formula_leaves"
LONG = "long_requests_leave_what_the_formula_leaves"
LOWEST = "of_equal_candidates_the_lowest_are_left"
ESTIMATE = "what_is_added_is_what_the_formula_says"
WORTH = "pages_are_worth_what_the_formula_says"
ADDED = "a_correction_adds_what_is_left_out_and_nothing_else"
ALIKE = "kernels_correct_as_the_reference_does"
UNIFORM = (residual_estimate, "uniform_units_give_attention_to_everything")
DIFFERS = (keydiff_pages, "pages_are_worth_what_the_formula_says")
OWN_SCORES = "every_page_has_a_score_of_its_own_request"
SHARES = (residual_estimate, "many_shares_and_many_ids")
WEIGHED = "the_reference_scores_units_as_the_formula_says"
COPIES = (top_p_keys, "kernels_write_what_the_reference_writes")
AGREES = (sparsity_selection, "selection_agrees_with_float64")
BF16 = {"label": "bf16", "dtype": torch.bfloat16, "kv_heads": 4, "group": 4, "channels": 8}
PACKED = {"label": "int4", "dtype": torch.float16, "kv_heads": 3, "group": 1, "channels": 16}
BIASED = "a_large_bias_of_a_channel_costs_4_bit_labels_hardly_anything"
WHOLE = (clusterkv_selection, "whole_clusters_by_falling_score_and_only_the_last_is_cut")
STORED = (clusterkv_selection, "stored_clusters_are_permutations_in_order")
KEPT = (test_votes, "what_is_kept_is_the_best_and_the_window")
VOTED = (rocketkv_votes, "a_prompt_keeps_the_best_votes_and_its_window")
BOTH_STAGES = (rocketkv_decode, "steps_select_among_what_is_kept_and_what_came_since")
KERNEL_SCORES = (rocketkv_scores, "kernels_score_and_read_what_the_formula_says")
FOUND = "unit_is_found_as_soon_as_decode_closes_it"
PROMISED = "promised_units_are_selected"
KERNELS = "kernels_select_what_the_reference_selects"
ORACLE = "selections_are_those_of_the_oracle"

MUTANTS = [
    of_sparse(
        sparsity.ChoosesAgain,
        test_channels,
        "the_first_chunk_of_a_prompt_chooses",
    ),
    sparse(sparsity.LabelsOfNextToken, FOUND),
    sparse(sparsity.LabelsFromRing, "single_tokens_need_no_ring"),
    packed(sparsity.ScaleForZero, "needle_in_a_prompt", ANYWHERE),
    of_sparse(
        sparsity.CutsCodesOff,
        test_labels,
        "packed_labels_are_those_of_the_reference",
        dtype=torch.bfloat16,
        channels=5,
    ),
    of_sparse(sparsity.SharesTheScale, sparsity_selection, BIASED),
    of_sparse(sparsity.ForgetsTheDivisor, *AGREES, **PACKED),
    of_sparse(sparsity.KernelForgetsTheDivisor, *AGREES, ("interpret",), **PACKED),
    of_sparse(
        sparsity.ForgetsSinks,
        sparsity_properties,
        "sinks_are_forced_and_the_best_of_the_others_follow",
        ANYWHERE,
        label="bf16",
        scope="kv_head",
    ),
    of_sparse(sparsity.HeadsUnweighted, *AGREES, **BF16),
    sparse(sparsity.HeadsOfNeighbours, "heads_are_alike"),
    of_sparse(sparsity.KernelNaturalBase, *AGREES, ("interpret",), **BF16),
    of_cluster(clusterkv.CutsFront, *WHOLE, ANYWHERE),
    of_cluster(clusterkv.AddsHeadsUp, *WHOLE),
    of_cluster(clusterkv.MeansOfDirections, *STORED),
    of_cluster(
        clusterkv.EmptyIsNaN, clusterkv_properties, "an_empty_cluster_has_a_centroid_of_numbers"
    ),
    of_cluster(
        clusterkv.ClustersLate, clusterkv_decode, "windows_are_clustered_as_decode_fills_them"
    ),
    of_cluster(clusterkv.KeepsRejected, clusterkv_decode, "rollback_below_the_clustered_tokens"),
    cluster(clusterkv.ForgetsOpenWindow, FOUND, ANYWHERE),
    cluster(clusterkv.KernelUnscaled, KERNELS, ("interpret",)),
    coded(paris.LengthAlone, ORACLE),
    coded(paris.RotatesKeysAlone, ORACLE),
    coded(paris.CodesWholeKeys, ORACLE),
    coded(paris.WordsOfNeighbours, "decode_builds_what_a_prompt_builds"),
    coded(paris.MeanQuery, "every_query_head_finds_its_needle", ANYWHERE),
    coded(paris.ForgetsRecent, PROMISED),
    coded(paris.KernelUnflipped, KERNELS, ("interpret",)),
    coded(paris.KernelOverlooksOutliers, KERNELS, ("interpret",)),
    of_rocket(rocket.Unpooled, *VOTED),
    of_rocket(rocket.WindowForgotten, *VOTED),
    of_rocket(rocket.OldVotersStay, rocketkv_votes, "a_later_prompt_votes_anew_over_everything"),
    of_rocket(rocket.DroppedForGood, rocketkv_votes, "a_later_prompt_votes_anew_over_everything"),
    of_rocket(rocket.RejectedStayDropped, rocketkv_votes, "a_prompt_that_lost_its_end"),
    of_rocket(
        rocket.UnitsNeedAllTokens, rocketkv_votes, "a_unit_stays_for_one_token_that_is_kept"
    ),
    in_chat(rocket.SelectsDropped, *BOTH_STAGES, ANYWHERE),
    rocket_kit(rocket.Unpooled, ORACLE),
    rocket_kit(rocket.WindowForgotten, ORACLE),
    rocket_kit(rocket.UnitsNeedAllTokens, ORACLE),
    rocket_kit(rocket.SignOfFirstHead, ORACLE),
    rocket_kit(rocket.ReadsSmallestChannels, ORACLE),
    of_bounds(rocket.NoTemperature, rocketkv_scores, WEIGHED),
    of_bounds(
        rocket.OpenUnitUncounted, rocketkv_scores, "bounds_token_by_token_are_those_at_once"
    ),
    rocket_kit(rocket.RowForSlot, "slots_and_host_pages_do_not_matter"),
    of_bounds(rocket.RowForSlot, *KERNEL_SCORES, ("interpret",)),
    rocket_kit(
        rocket.TailTooShort,
        "a_prompt_over_pages_of_another_computes_its_tail_alone",
        suite=rocketkv_kit.TestRocketKV,
    ),
    of_bounds(rocket.KernelReadsOneMore, *KERNEL_SCORES, ("interpret",)),
    of_bounds(rocket.KernelReadsMinima, *KERNEL_SCORES, ("interpret",)),
    of_snap(prompt.Unpooled, *KEPT),
    of_snap(prompt.LastChunkVotes, *KEPT),
    of_snap(prompt.OutOfOrder, *KEPT),
    of_snap(prompt.LogitsVote, *KEPT),
    snap(prompt.ShortWindow, PROMISED),
    snap(prompt.RowForSlot, "slots_and_host_pages_do_not_matter", ANYWHERE),
    stays(
        prompt.Evicts,
        snapkv_properties,
        "the_kept_set_stays_and_generated_tokens_follow",
        ANYWHERE,
    ),
    snap(
        prompt.TailTooShort,
        "a_prompt_over_pages_of_another_computes_its_tail_alone",
        suite=snapkv_kit.TestSnapKV,
    ),
    stream(prompt.OneSinkTooFew, PROMISED, ANYWHERE),
    stream(prompt.RoundsSinksDown, PROMISED),
    stream(prompt.LateWindow, PROMISED, ANYWHERE),
    stream(prompt.WindowInTokens, "length_edges"),
    of_top_p(top_p.PrunesToTheMean, top_p_selection, "every_query_head_has_its_share"),
    of_top_p(top_p.KeepsTooLittle, *SHARE, ANYWHERE),
    of_top_p(top_p.KeepsTooMuch, *SHARE),
    of_top_p(top_p.UnscaledLogits, *SHARE),
    of_top_p(top_p.BestTokenForUnit, *SHARE),
    of_top_p(top_p.DropsTheWeightless, *NEUTRAL),
    of_top_p(top_p.MovesUp, *NEUTRAL, ANYWHERE),
    of_top_p(top_p.KernelCutsCodesOff, *COPIES, ("interpret",), dtype=torch.float32),
    of_top_p(top_p.KernelCodesWholeKeys, *COPIES, ("interpret",), dtype=torch.float32),
    _stage(top_p.ForgetsDecoded, TopPTriton, top_p_kit, DECODED, ANYWHERE),
    of_top_p(top_p.KernelHigherOfEquals, *EQUALS, ("interpret",), p=0.5, count=10),
    of_top_p(top_p.KernelSkipsTheLastBlock, *BLOCKS, ("interpret",), widen=1),
    of_top_p(top_p.KernelForgetsTheLeast, *SHARE, ("interpret",)),
    of_top_p(top_p.KernelSharesOfOneHead, *SHARE, ("interpret",)),
    _stage(top_p.EnoughForOneHead, TopPTriton, top_p_kit, LEFT, ("cpu",)),
    _stage(top_p.StopsBeforeTheShare, TopPTriton, top_p_kit, LEFT, ("cpu",)),
    _stage(top_p.HigherOfEquals, TopPTriton, top_p_kit, LOWEST, ("cpu",)),
    _stage(top_p.UnscaledLogits, TopPTriton, top_p_kit, LEFT, ("cpu",)),
    _stage(top_p.KernelSharesOfOneHead, TopPTriton, top_p_kit, LEFT, ("interpret",)),
    _stage(top_p.EnoughForOneHead, TopPTriton, top_p_kit, LONG, ("cpu",)),
    _stage(residual.WeighsAsOneToken, ResidualTriton, residual_kit, ESTIMATE, ("cpu",)),
    _stage(residual.AddsKeys, ResidualTriton, residual_kit, ESTIMATE, ("cpu",)),
    _stage(keydiff.KeepsTheAlike, KeyDiffKernels, keydiff_kit, WORTH, ANYWHERE),
    _stage(keydiff.LongKeysWeighMore, KeyDiffKernels, keydiff_kit, WORTH, ("cpu",)),
    _stage(residual.ForgetsDecoded, ResidualTriton, residual_kit, DECODED, ANYWHERE),
    _stage(residual.CountsTwice, ResidualTriton, residual_kit, ADDED, ANYWHERE),
    _stage(residual.KernelScalesTwice, ResidualTriton, residual_kit, ALIKE, ("interpret",)),
    of_residual(residual.WeighsAsOneToken, *UNIFORM, scope="kv_head"),
    of_residual(residual.CountsTheOpenUnit, *UNIFORM, ANYWHERE, scope="shared"),
    of_residual(residual.AddsKeys, *UNIFORM, scope="kv_head"),
    of_residual(residual.KernelSkipsTheLastShare, *SHARES, ("interpret",)),
    of_residual(residual.KernelSkipsTheLastIds, *SHARES, ("interpret",)),
    _stage(keydiff.ForgetsDecoded, KeyDiffKernels, keydiff_kit, DECODED, ANYWHERE),
    _stage(keydiff.GoesByOtherRequests, KeyDiffKernels, keydiff_kit, OWN_SCORES, ANYWHERE),
    of_keydiff(keydiff.KeepsTheAlike, *DIFFERS, scope="kv_head"),
    of_keydiff(keydiff.LongKeysWeighMore, *DIFFERS, scope="shared"),
    of_keydiff(keydiff.KernelSkipsTheLastToken, *DIFFERS, ("interpret",), scope="kv_head"),
    Mutant(
        name_of(skip.StandsBehind),
        OptionTests,
        "test_it_takes_no_part_in_selections",
        mutated(skip_kit.ENTRY, skip.StandsBehind),
        skip_kit.ENTRY,
        options=skip_kit.OPTIONS,
    ),
    of_skip(skip.LooksAhead, *FORMULA),
    of_skip(skip.EachHeadForAll, test_skip, "query_heads_of_a_kv_head_vote_together", loud=1),
    of_skip(skip.NeverLambda, test_skip, "the_block_of_the_maximum_stays_whatever_the_factor"),
    of_skip(skip.ByWhatIsAttended, *FORMULA),
    of_skip(skip.ByTheFirstRow, test_skip, "each_row_goes_by_the_length_of_its_own_request"),
    of_skip(skip.KeepsTheNorm, *FORMULA),
    of_skip(skip.ReadsWhatItSkips, *FORMULA),
    of_skip(skip.IgnoresTheOption, *CHAIN, selector="quest"),
    of_skip(skip.LeavesNoLengths, *CHAIN, selector="quest"),
    of_skip(skip.KernelPaddingVotes, *FORMULA, ("interpret",)),
    of_skip(skip.KernelNaturalLogarithm, *FORMULA, ("interpret",)),
    of_skip(
        skip.KernelSkipsWithout,
        test_skip,
        "tables_without_lengths_are_attended_to_as_a_whole",
        ("interpret",),
    ),
]
