"""The kind of a metric by its name, and by what declared it."""

import pytest

from fedjax_pfl import metric_kinds
from fedjax_pfl.metric_kinds import Kind

BY_NAME = {
    Kind.FRACTION: (
        "global_accuracy c_spec c_gen c_per client_accuracy_std client_accuracy_mlp "
        "exit3_accuracy exits_disagree other_exits_disagree global_macro_f1 client_auc "
        "client_ece_pooled client_class3_accuracy_pooled dropped critical dropped_later"
    ),
    Kind.PERPLEXITY: "masked_perplexity exit1_perplexity client_perplexity_std",
    Kind.LOSS: "train_loss global_loss client_loss client_focal_loss_pooled",
    Kind.NUMBER: "mean_layer mb_later bytes_up seconds client_margin critical_layer",
}


@pytest.mark.parametrize(
    "kind, name", [(kind, name) for kind in BY_NAME for name in BY_NAME[kind].split()]
)
def test_a_name_says_its_kind(kind, name):
    """Of everything that evaluations measure; what is unknown is a number."""
    assert metric_kinds.of(name) is kind


def test_what_is_declared_counts():
    """Before the name, which then only says what kind of a number it is."""
    names = "critical", "share_of_mine", "dropped", "train_loss", "client_my_accuracy"
    known = metric_kinds.declared(names, ("critical", "share_of_mine"))
    assert known == {
        "critical": Kind.FRACTION,
        "share_of_mine": Kind.FRACTION,
        "dropped": Kind.NUMBER,
        "train_loss": Kind.LOSS,
        "client_my_accuracy": Kind.NUMBER,
    }
    assert metric_kinds.of("dropped", known) is Kind.NUMBER
    assert metric_kinds.of("c_gen", known) is Kind.FRACTION
