"""Arguments of Megatron-LM for routers: losses of the balance, z losses, rules of dropping."""

import pytest

from zsim.scenario import trainer_files
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse

TEXT = """
title = "from a command line"
[model]
[cluster]
topology = "dgx_h100_infiniband"
nodes = 1
[zero]
megatron_arguments = "arguments.txt"
[train]
"""
SHAPE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 1000"
    " --use-distributed-optimizer --micro-batch-size 1"
)


def read(words: str) -> Scenario:
    return trainer_files.configured(parse(TEXT), words, key="megatron_arguments")[0]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (
            "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4",
            ("seq_aux_loss", True),
        ),
        (
            "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3",
            ("global_aux_loss", True),
        ),
        ("--moe-router-load-balancing-type global_aux_loss", (None, False)),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-3", (None, False)),
    ],
)
def test_losses_of_the_balance_are_read_if_their_coefficient_is_not_zero(
    text: str, fields: tuple[str | None, bool]
) -> None:
    experts = read(f"{SHAPE} --num-experts 4 {text}").model.experts
    assert experts is not None
    assert (experts.load_balancing_type, experts.auxiliary_loss) == fields


def test_a_z_loss_and_a_rule_of_dropping_are_read() -> None:
    experts = read(
        f"{SHAPE} --num-experts 4 --moe-z-loss-coeff 1e-3 --moe-expert-capacity-factor 1.5"
        " --moe-token-drop-policy position"
    ).model.experts
    assert experts is not None
    assert (experts.z_loss, experts.drop_policy) == (True, "position")


def test_factors_of_losses_and_the_rate_of_biases_are_read() -> None:
    experts = read(
        f"{SHAPE} --num-experts 4 --moe-z-loss-coeff 2e-3 --moe-aux-loss-coeff 3e-4"
        " --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
        " --moe-router-bias-update-rate 1e-2"
    ).model.experts
    assert experts is not None
    assert (experts.z_coefficient, experts.auxiliary_coefficient) == (2e-3, 3e-4)
    assert experts.bias_rate == 1e-2
    plain = read(f"{SHAPE} --num-experts 4 --moe-router-bias-update-rate 1e-2").model.experts
    assert plain is not None
    assert (plain.bias_rate, plain.z_coefficient, plain.auxiliary_coefficient) == (None,) * 3


def test_a_balance_without_a_loss_of_routers_is_refused() -> None:
    with pytest.raises(ScenarioError) as caught:
        read(f"{SHAPE} --num-experts 8 --moe-router-load-balancing-type sinkhorn")
    assert "--moe-router-load-balancing-type: 'sinkhorn' must be " in str(caught.value)
