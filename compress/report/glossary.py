"""The meaning of every figure of the report: one table, from which the page's explanations and a section of the reference are made.

`term_of` finds the entry of a label, such as the name of a column. Labels that vary from run to run name their entry in the template:
`data-term="KEY"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from foundation.core.engines import ENGINES, SERVERS


class Term(NamedTuple):
    """One entry."""

    key: str
    """Key for templates and anchors."""
    name: str
    """Its title."""
    meaning: str
    """Plain sentences, no markup."""
    labels: tuple[str, ...] = ()
    """Labels on the page that mean exactly this, as they are written there; the title is one anyway."""


GROUPS: Mapping[str, tuple[Term, ...]] = {
    "Accuracy": (
        Term("metric", "Metric", "The primary metric of the task on the evaluation rows, which no stage has seen.", ("Measured",)),
        Term(
            "interval",
            "95 % interval",
            "Range in which the value would probably lie if other rows of the same kind were drawn: how certain it is. It is computed over "
            "the evaluation rows: for shares by the score, else by the bootstrap, or by the jackknife where rows share texts. More rows "
            "make it narrower.",
            ("interval",),
        ),
        Term(
            "paired",
            "Paired interval",
            "The interval of a difference between two models on the same rows. It is much narrower than the interval of either value, "
            "since what makes a row hard is hard for both.",
            ("change, 95 % interval", "paired 95 % interval"),
        ),
        Term("n", "n", "Number of rows (tokens, for language models) or timed samples behind a figure."),
        Term(
            "change",
            "Change",
            "The value minus the value of the baseline in torch, on the same rows. Points (pt) are differences of percentages: from 91 % "
            "to 90 % is -1 pt. For perplexity it is relative, in percent.",
            ("Difference",),
        ),
        Term(
            "lost",
            "Lost and gained",
            "Rows that are right in the baseline and wrong here are lost; the reverse are gained.",
            ("lost", "gained"),
        ),
        Term(
            "backend",
            "Backend",
            "What computed the answers: torch, an engine in a separate process, or the real server. A cell holds the metric in this "
            "backend, its interval, and the change against the baseline in torch.",
            (*SERVERS.values(), *(facts.title for facts in ENGINES.values())),
        ),
        Term("accuracy", "accuracy", "Share of the rows (tokens, images) whose answer is right."),
        Term("top_5", "top_5", "Share of the rows whose true class is among the five likeliest ones."),
        Term(
            "f1",
            "f1",
            "Harmonic mean of precision and recall: of class 1 where there are two classes, else the plain mean over all classes.",
            ("F1",),
        ),
        Term("precision_of_class", "Precision", "Of the rows predicted as this class, the share that belongs to it."),
        Term("recall_of_class", "Recall", "Of the rows that belong to this class, the share that is predicted as it."),
        Term(
            "matthews",
            "matthews",
            "Matthews correlation between answers and labels: 1 is perfect, 0 is no better than chance, also where one class is rare.",
        ),
        Term("micro_f1", "micro_f1", "F1 over all pairs of a row and a label together: frequent labels count most."),
        Term("macro_f1", "macro_f1", "Plain mean of the F1 of every label: rare labels count as much as frequent ones."),
        Term("exact_match", "exact_match", "Share of the rows whose predicted set of labels is exactly right."),
        Term("entity_f1", "entity_f1", "F1 of whole entities: type, first and last word all have to be right."),
        Term("entity_precision", "entity_precision", "Of the predicted entities, the share that is right."),
        Term("entity_recall", "entity_recall", "Of the true entities, the share that is predicted."),
        Term("answer_f1", "answer_f1", "Mean F1 of the words of an answer and of the nearest true answer, as SQuAD counts it."),
        Term("answer_exact_match", "answer_exact_match", "Share of the questions answered exactly, ignoring articles and punctuation."),
        Term("has_answer_f1", "has_answer_f1", "answer_f1 of the questions that have an answer."),
        Term("no_answer_f1", "no_answer_f1", "Of the questions without an answer, the share that the model leaves unanswered."),
        Term("wer", "wer", "Word error rate: words to replace, insert or delete, divided by the words that were spoken. Lower is better."),
        Term("cer", "cer", "Character error rate: the same for characters."),
        Term("pearson", "pearson", "Linear correlation of predicted and true values; 1 is perfect."),
        Term("spearman", "spearman", "Correlation of the ranks of predicted and true values: whether the order is right."),
        Term(
            "perplexity",
            "perplexity",
            "Exponential of the mean loss of the next token. A perplexity of 20: as uncertain as a choice among 20 equally likely "
            "tokens. Lower is better.",
        ),
        Term("ndcg", "NDCG@10", "Whether relevant documents come first among the first ten; 1 is the best order there is.", ("ndcg@10",)),
        Term("mrr", "MRR@10", "Mean of 1 / place of the first relevant document, among the first ten.", ("mrr@10", "map")),
        Term("recall_at", "recall@k", "Share of the relevant documents that are among the first k results."),
        Term(
            "chance",
            "Majority baseline",
            "The score of a model that always predicts the most frequent class, or ignores its input in another way. A model that is no "
            "better has learned nothing that the metric shows.",
        ),
        Term("support", "Rows of a class", "How many evaluation rows (entities) belong to the class."),
        Term("other_metric", "Other metrics", "Every metric of the task in every backend; goals refer to the primary one."),
        Term("other_answers", "Other answers", "Share of the evaluation rows that the baseline in torch answers otherwise."),
        Term(
            "auroc",
            "AUROC",
            "Take a row that is answered as by the baseline and a row that is answered otherwise. This is the probability that the first "
            "has the larger margin. 0.5: the margin says nothing about answers; 1: it separates them.",
        ),
        Term(
            "aurc",
            "AURC",
            "Mean share of other answers among the k rows with the largest margins, over all k. Smaller is better: a cascade keeps more "
            "rows.",
        ),
        Term(
            "first_ten",
            "First 10 in common",
            "Share of the ten nearest texts or documents that the float vectors of the baseline retrieve too.",
        ),
        Term("stored", "Stored as", "How an index keeps the numbers of a vector: float32, a byte each (int8), or a bit each (binary)."),
        Term("vector_bytes", "Bytes", "Bytes of one stored vector."),
        Term(
            "flip",
            "Flipped rows",
            "Rows whose answer differs from the step before: right to wrong, wrong to right, or wrong to another wrong one.",
        ),
    ),
    "Data": (
        Term("split_train", "Train", "Rows that weights are trained on, and that quantization is calibrated on.", ("train",)),
        Term(
            "split_selection",
            "Selection",
            "Rows for every decision before the final figures: which epoch, threshold or scheme to keep. Never trained on.",
            ("selection",),
        ),
        Term("split_evaluation", "Evaluation", "Rows for the figures of this report only; no decision depends on them.", ("evaluation",)),
        Term("split_rows", "Rows of a split", "Number of rows of the split, without rows that it shares with another split."),
        Term(
            "truncated",
            "Truncated",
            "Rows that are longer than data.max_length: the model does not see their end. Give a larger max_length, or data.windows.",
        ),
        Term("longest", "Longest", "Tokens of the longest row, special tokens included."),
    ),
    "Speed": (
        Term(
            "p50",
            "p50",
            "Median: half of the samples are faster. Milliseconds of one call of the engine with the whole batch.",
            ("p50 ms",),
        ),
        Term("p90", "p90", "90 of 100 samples are at least as fast.", ("p90 ms",)),
        Term("p99", "p99", "99 of 100 samples are at least as fast: the slow tail. It needs 200 samples.", ("p99 ms",)),
        Term(
            "speedup",
            "Speed-up",
            "Time of the baseline in torch (fp32, eager) divided by the time here, same shape, device and threads. Engines take turns; the "
            "ratio is formed within each turn and averaged (geometric mean). The headline is the worst of the target shapes.",
        ),
        Term("throughput", "Rows/s", "Rows per second: batch size times samples, divided by their total time."),
        Term("samples", "Samples / median", "Spread of the samples around their median: thin line 5 to 95 %, thick line 25 to 75 %."),
        Term("shape_time", "Time, ms", "Geometric mean of the p50 over the target shapes, or the figure that the goals limit."),
        Term("concurrency", "Concurrency", "Requests that are under way at the same time; each holds one row.", ("Requests under way",)),
        Term("processes", "Processes", "Processes of the model in the server, each with its own copy of the weights."),
        Term("threads", "Threads of each", "Threads that each process computes with."),
        Term("largest_batch", "Largest batch", "Most rows that the server merges into one call of the engine."),
        Term("waits", "Waits, ms", "How long a request may wait for others to form a batch with."),
        Term("against_recipe", "against the recipe", "Rows per second divided by the rows per second with the recipe's settings."),
        Term("rounds", "Rounds", "Rounds of the search that the settings survived; each round measures three times as long."),
        Term("goals_missed", "Goals missed", "Goals of the recipe that this configuration would miss."),
    ),
    "Cascade": (
        Term("tier", "Tier", "A model of the cascade: it answers the rows that it is sure of, the others go to the next one."),
        Term("score", "Score", "How sure a model is of an answer, computed from its logits; a larger score is a surer answer."),
        Term("threshold", "Threshold", "The least score of a row that the tier answers itself."),
        Term("rows_of_tier", "Rows of the tier", "Share of the certificate rows that the tier answers."),
        Term("goes_on", "Goes on", "Share of all certificate rows that go beyond the tier, and the upper confidence limit of that share."),
        Term("other_alone", "Other answers alone", "Certificate rows that this tier alone answers otherwise than the original in torch."),
        Term(
            "row_time",
            "Time of a row",
            "Time of one row in the engines that answer it, at the mix of lengths of the evaluation rows.",
            ("Mean of a row, ms", "Row ms, p50", "Row ms, p90", "Row ms, p99"),
        ),
    ),
    "Answers of language models": (
        Term("streams", "Streams", "Prompts that are answered at the same time."),
        Term(
            "first_token",
            "First token",
            "Time from the request to the first token of the answer: the whole prompt is read in it.",
            ("First token ms, p50", "First token ms, p90", "First token ms, p99"),
        ),
        Term(
            "per_token",
            "Per token",
            "Time between two tokens of one stream.",
            ("Per token ms, p50", "Per token ms, p90", "Per token ms, p99"),
        ),
        Term(
            "tokens_per_s", "Tokens/s", "Tokens per second of all streams together.", ("Tokens/s without", "Tokens/s with", "Engine alone")
        ),
        Term("engine_share", "Server / engine", "Tokens per second of the server, divided by tokens per second of the engine alone."),
        Term(
            "bandwidth",
            "Bandwidth",
            "Share of this machine's memory bandwidth that one stream uses. Near 100 % memory is the bottleneck: only fewer bytes make it "
            "faster.",
        ),
        Term("weight_bytes", "Weights", "Bytes of weights that are read for each token."),
        Term("cache_bytes", "Cache per token", "Bytes of the keys and values that each token adds to the cache."),
        Term(
            "equal_tokens",
            "Tokens of the baseline",
            "Share of the greedy tokens that equal the tokens of the float baseline, up to the first different one.",
        ),
        Term(
            "own_tokens",
            "Tokens of torch",
            "The same, compared with the same checkpoint in torch, of a compressed one on up to 32 prompts: what the engine alone changed.",
            ("Same tokens",),
        ),
        Term("same_answer", "Same answer", "Answers that are the same to the last token."),
        Term("first_other", "First other token", "Position of the first token that differs: the median over the answers that differ."),
        Term("bleu", "BLEU", "Overlap of n-grams of one to four words with the reference translations, 0 to 100."),
        Term("chrf", "chrF", "Overlap of character n-grams with the reference translations, 0 to 100."),
        Term("accepted", "Accepted", "Proposed tokens that the model would have chosen itself."),
        Term("tokens_per_step", "Tokens per step", "Tokens that one pass of the model yields; 1 without proposals."),
        Term(
            "cache_cost",
            "Cost of the cache",
            "The metric with keys and values in float, and in the precision that is served.",
            ("with its own",),
        ),
    ),
    "Size and memory": (
        Term("deployed", "Deployed", "Bytes of the files that the engine loads, without the tokenizer.", ("Deployed size", "Size")),
        Term("checkpoint", "Checkpoint", "Bytes of the checkpoint that the stage wrote, in float."),
        Term("parameters", "Parameters", "Numbers that the model has learned."),
        Term(
            "macs",
            "MACs",
            "Multiply-accumulates: one multiplication and one addition, the unit in which matrix products are counted. Half the FLOPs.",
            ("MACs per row",),
        ),
        Term(
            "memory",
            "Memory",
            "Peak resident memory of the process, with its libraries. For a server: the sum over its processes.",
            ("Peak memory", "Memory of the engine", "Memory of the server"),
        ),
        Term("stage_time", "Time", "Wall time of the step, in the run that computed it.", ("Took",)),
    ),
    "Integers": (
        Term(
            "int8_share",
            "int8 share",
            "Share of the multiply-accumulates of matrix products with weights that the engine runs in int8, as its own execution graph "
            "says. Products of attention have no weights and are counted apart.",
        ),
        Term("integer_weights", "Integer weights", "Share of the weights that the files of the engine hold as integers."),
        Term(
            "gemm", "GEMM", "A matrix product: nearly all of the time of a Transformer. The bar is its share of all multiply-accumulates."
        ),
        Term(
            "sqnr",
            "Signal-to-quantization-noise ratio",
            "Power of the values divided by the power of their rounding errors, in decibels. 6 dB more are one bit more; low ones hurt.",
        ),
        Term(
            "sensitivity",
            "Sensitivity",
            "How much the answers move when one layer or block alone is changed, on rows of the selection split.",
        ),
        Term(
            "distance",
            "Distance",
            "How far two answers are apart: KL divergence of the predicted probabilities in nats, or the squared error of the output. 0 is "
            "the same answer.",
            ("Error",),
        ),
        Term("parity", "Parity", "Whether the engine computes what torch computes: answers, logits and integer codes of every layer."),
        Term(
            "disagreements",
            "Predictions that differ",
            "Selection rows for which engine and torch give another answer, and how many are allowed.",
        ),
        Term("median_difference", "Median difference", "Median absolute difference of a logit (loss of a token) between engine and torch."),
        Term("largest_difference", "Largest", "Largest absolute difference; reported, not judged."),
        Term(
            "codes",
            "Int8 codes by layer",
            "Integers of the engine, compared with the integers that torch predicts; a few may differ by one where a value is close to a "
            "rounding boundary.",
        ),
    ),
    "Pruning and sparsity": (
        Term("kept_units", "Kept", "Heads, neurons or experts of each block that remain, out of the number before."),
        Term("predicted_ms", "Predicted ms", "Latency that the table of measured blocks predicts."),
        Term("measured_ms", "Measured ms", "Median latency that was measured."),
        Term("prediction_error", "Prediction error", "Predicted divided by measured latency, minus one."),
        Term("against_target", "Against target", "Measured latency divided by the target, minus one."),
        Term("cost_kept", "Cost kept", "Share of the multiply-accumulates (parameters, milliseconds) that is left after the step."),
        Term("steps", "Steps", "Updates of the weights."),
        Term("loss_by_epoch", "Loss by epoch", "Mean training loss of each epoch."),
        Term("loss_terms", "Loss terms, last epoch", "The terms whose weighted sum is the loss."),
        Term("selection_score", "Selection score", "The primary metric on the selection rows, by which the best epoch was kept."),
        Term("expert_load", "Expert load", "Share of the tokens of a block that are routed to each expert."),
        Term("zero_weights", "Zero weights", "Share of the weights of the layer that are exactly zero."),
        Term("zero_blocks", "All-zero blocks", "Share of the blocks of weights that are zero throughout."),
        Term("zero_outputs", "All-zero outputs", "Outputs of the layer without a nonzero weight: they can be removed."),
        Term("group_quantile", "Quantile", "Root mean square of the weights of a group; the median group is at 50 %."),
        Term("zero_inputs", "All-zero inputs", "Inputs of the layer without a nonzero weight."),
    ),
    "Training profiles": (
        Term("step", "Step", "Time of one update of the weights, with the next batch."),
        Term("rows_per_second", "Rows per second", "Rows that the training reads a second, all processes together."),
        Term("tokens_per_second", "Tokens per second", "Tokens that the training reads a second, without padding."),
        Term("padding", "Padding", "Share of the tokens that only fill rows up to the length of the batch."),
        Term(
            "utilisation",
            "Model FLOPs utilisation",
            "FLOPs that the model needs, divided by the FLOPs that the device does in the same time in one large matrix product.",
        ),
        Term("communication", "Communication", "Share of a step that processes spend exchanging gradients and weights."),
    ),
    "Comparison": (
        Term(
            "no_difference",
            "Better or worse",
            "Better or worse if the paired interval of the change lies on one side of 0. If it contains 0, the rows show no difference.",
        ),
        Term(
            "fronts",
            "On the front",
            "Own: no configuration of the same run is both faster and at least as good at this shape. Joint: no configuration of any run "
            "is; times of different runs were not measured in turns.",
        ),
    ),
    "Search": (
        Term("rows_searched", "Candidates", "Settings that reached this step of the search."),
        Term("dropped", "Dropped", "Candidates that were not promoted: others were better in every objective."),
        Term("importance", "Importance", "Share of the differences between candidates that the knob explains (fANOVA)."),
    ),
}
TERMS: Mapping[str, Term] = {term.key: term for terms in GROUPS.values() for term in terms}


def _plain(label: str) -> str:
    return " ".join(label.replace("\u00a0", " ").replace("_", " ").split()).casefold()


_BY_LABEL: Mapping[str, Term] = {_plain(label): term for term in TERMS.values() for label in (term.name, *term.labels)}


_BY_START: Mapping[str, str] = {"recall@": "recall_at"}
_BY_END: Mapping[str, str] = {" change": "change", " with a float cache": "cache_cost", " kept": "kept_units"}


def term_of(label: str) -> Term | None:
    """Returns the entry that a label on the page means; None if it has none. Labels such as `Accuracy change` are found by their end."""
    plain = _plain(label)
    if plain in _BY_LABEL:
        return _BY_LABEL[plain]
    keys = [key for start, key in _BY_START.items() if plain.startswith(start)] + [
        key for end, key in _BY_END.items() if plain.endswith(end)
    ]
    return TERMS[keys[0]] if keys else None
