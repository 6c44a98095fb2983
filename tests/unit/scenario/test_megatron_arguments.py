"""Arguments of Megatron-LM are what the scenario means; what they cannot say is one line."""

import json
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api.scenario import load
from zsim.files.installed import model_catalogue
from zsim.mistake import MistakeError
from zsim.scenario import trainer_files
from zsim.scenario.model_catalogue import named
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.toml import parse
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.megatron.options import Megatron

configured = partial(trainer_files.configured, key="megatron_arguments")

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
LLAMA3_8B = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    " --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192"
    " --max-position-embeddings 8192 --position-embedding-type rope --attention-dropout 0.0"
    " --hidden-dropout 0.0 --swiglu --normalization RMSNorm --disable-bias-linear"
    " --untie-embeddings-and-output-weights --vocab-size 128256 --micro-batch-size 1"
    " --global-batch-size 128 --bf16 --use-distributed-optimizer"
)


def read(words: str, *changes: str) -> Scenario:
    return configured(parse(TEXT, changes), words)[0]


def left(words: str) -> tuple[str, ...]:
    return configured(parse(TEXT), words)[1]


def refusal(words: str, *changes: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        read(words, *changes)
    return str(caught.value)


MIXTRAL = (
    "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm --moe-aux-loss-coeff 0.02"
    " --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4"
    " --expert-tensor-parallel-size 1 --moe-permute-fusion"
)


def test_arguments_of_experts_set_the_model_and_their_ranks() -> None:
    found = read(f"{LLAMA3_8B} {MIXTRAL}")
    experts = found.model.experts
    assert experts is not None
    assert (experts.count, experts.top_k, experts.intermediate_size) == (8, 2, 14336)
    assert (experts.scores, experts.kernels) == ("softmax_of_chosen", "grouped")
    assert experts.auxiliary_loss
    assert (found.parallel.expert, found.parallel.expert_tensor) == (4, 1)
    assert left(f"{LLAMA3_8B} {MIXTRAL}") == ()


def test_arguments_of_deepseek_set_groups_bias_and_dense_layers() -> None:
    experts = read(
        f"{SHAPE.replace('layers 2', 'layers 6')} --num-experts 16 --moe-router-topk 4"
        " --moe-ffn-hidden-size 32"
        " --moe-shared-expert-intermediate-size 64 --moe-router-score-function sigmoid"
        " --moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 4"
        " --moe-router-group-topk 2 --moe-router-enable-expert-bias --moe-router-dtype fp32"
        " --moe-layer-freq ([0]*1+[1]*5)"
    ).model.experts
    assert experts is not None
    assert (experts.intermediate_size, experts.shared_intermediate_size) == (32, 64)
    assert (experts.scores, experts.scaling, experts.router_format) == ("sigmoid", 2.5, "fp32")
    assert (experts.groups, experts.top_groups, experts.dense_layers) == (4, 2, 1)
    assert experts.score_bias
    assert not experts.auxiliary_loss
    assert experts.kernels == "loop"


def test_scores_before_the_choice_are_not_normalised() -> None:
    experts = read(f"{SHAPE} --num-experts 4 --moe-router-pre-softmax").model.experts
    assert experts is not None
    assert (experts.scores, experts.normalised) == ("softmax", False)
    assert experts.intermediate_size == 4 * 64


def test_a_command_line_of_llama_3_8b_is_the_published_shape() -> None:
    published = named(parse(TEXT, ["model.name=llama3-8b"]), model_catalogue()).model
    found = read(LLAMA3_8B).model
    for key in ("layers", "hidden_size", "attention_heads", "key_value_heads", "vocab_size"):
        assert getattr(found, key) == getattr(published, key), key


def test_a_file_is_read_beside_the_scenario_and_what_differs_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    words = LLAMA3_8B.replace(" --hidden", " \\\n  --hidden")
    words += " --rampup-batch-size 128 8 1000 --start-weight-decay 0.1"
    command = f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}  # a run\n"
    (tmp_path / "arguments.txt").write_text(command, "utf-8")
    loaded = load(tmp_path / "scenario.toml")
    elements = sum(parameter.elements for parameter in loaded.model.parameters)
    assert elements == 8_030_261_248  # Llama 3 8B
    assert loaded.strategy.train.gradient_accumulation_steps == 128 // 8
    said = capsys.readouterr().err
    assert said == (
        "zsim: arguments.txt: not modelled: "
        "--start-weight-decay (the decay is train.weight_decay in every step)\n"
    )


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("", {}),
        ("--no-overlap-p2p-communication", {}),  # which one chunk never has
        ("--num-layers-per-virtual-pipeline-stage 2", {"num_layers_per_virtual_pipeline_stage": 2}),
        ("--num-virtual-stages-per-pipeline-rank 4", {"num_virtual_stages_per_pipeline_rank": 4}),
        ("--num-virtual-stages-per-pipeline-rank 1", {}),
        ("--num-layers-per-virtual-pipeline-stage 8", {}),
        (
            "--num-layers-per-virtual-pipeline-stage 4 --no-overlap-p2p-communication",
            {"num_layers_per_virtual_pipeline_stage": 4, "overlap_p2p_comm": False},
        ),
        (
            "--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers=10"
            " --num-virtual-stages-per-pipeline-rank 2",
            {
                "num_layers_in_first_pipeline_stage": 6,
                "num_layers_in_last_pipeline_stage": 10,
                "num_virtual_stages_per_pipeline_rank": 2,
            },
        ),
        (
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
        ),
        (
            "--pipeline-model-parallel-layout 'Et*8|(t*8|)*2,t*8L' --no-overlap-p2p-communication",
            {"pipeline_model_parallel_layout": "Et*8|(t*8|)*2,t*8L"},
        ),
        (
            "--pipeline-model-parallel-layout 'Et*4|(t*4|)*6,t*4L' --no-overlap-p2p-communication",
            {
                "pipeline_model_parallel_layout": "Et*4|(t*4|)*6,t*4L",
                "overlap_p2p_comm": False,
            },
        ),
    ],
)
def test_stages_of_a_pipeline_are_read(words: str, options: dict[str, object]) -> None:
    found = read(f"{LLAMA3_8B} --pipeline-model-parallel-size 4 {words}")
    assert found.parallel.pipeline == 4
    runtime = found.zero.model_dump()["megatron"]
    for name, kept in Megatron().model_dump().items():
        if name.startswith(("num_", "overlap_p2p", "account_", "pipeline_")):
            assert runtime.get(name, kept) == options.get(name, kept)


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.sampled_from(["", "--bf16", "--fp16"]),
    st.booleans(),
    st.integers(1, 5000),
)
def test_options_are_what_megatron_makes_of_them(
    tensor: int, cuts: bool, precision: str, overlaps: bool, vocabulary: int
) -> None:
    words = f"{SHAPE} --tensor-model-parallel-size {tensor} {precision}"
    words += f" --vocab-size={vocabulary}" + " --sequence-parallel" * cuts
    words += " --overlap-grad-reduce --overlap-param-gather" * overlaps
    found = read(words)
    assert found.parallel.tensor == tensor
    padded = found.model.vocab_size
    assert padded is not None
    assert padded % (128 * tensor) == 0 <= padded - vocabulary < 128 * tensor
    assert found.train.precision == (precision.removeprefix("--") or "fp32")
    runtime = found.zero.model_dump()["megatron"]
    assert runtime["sequence_parallel"] is (cuts and tensor > 1)
    assert runtime["overlap_grad_reduce"] is runtime["overlap_param_gather"] is overlaps
    # validate_args: bf16 sums in fp32 unless it is told not to
    assert runtime["grad_reduce_in_fp32"] is (precision == "--bf16")
    assert found.train.clip_norm == 1.0
    assert found.train.gradient_accumulation_steps == 1
    falls = ("--hysteresis (the loss scale falls at the first overflow)",)
    assert left(words) == (falls if precision == "--fp16" else ())
    assert left(f"{words} --hysteresis 1 --loss-scale-window 500 --sgd-momentum 0.5") == ()


@pytest.mark.parametrize(
    ("said", "exchange"),
    [("", "ring"), ("--cp-comm-type p2p", "ring"), ("--cp-comm-type all_gather", "all_gather")],
)
def test_context_ranks_exchange_keys_and_values_as_transformer_engine_does(
    said: str, exchange: str
) -> None:
    found = read(f"{SHAPE} --context-parallel-size 4 {said}").parallel
    assert (found.context, found.context_exchange) == (4, exchange)
    alone = read(f"{SHAPE} {said}").parallel
    assert (alone.context, alone.context_exchange) == (1, None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (f"{SHAPE} --context-parallel-size 2 --cp-comm-type a2a", "a2a is not modelled"),
        (f"{SHAPE} --context-parallel-size 2 --cp-comm-type b2b", "'b2b' must be p2p or all_"),
        (
            f"{SHAPE} --pipeline-model-parallel-layout Et|x|tL",
            "--pipeline-model-parallel-layout: 'x' must be E, t, L,",
        ),
        (
            f"{SHAPE} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"
            " --account-for-loss-in-pipeline-split",
            "--decoder-first-pipeline-num-layers: contradicts account_for_loss_in_pipeline_split",
        ),
        (
            f"{SHAPE} --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 0",
            "--decoder-last-pipeline-num-layers: '0' must be a whole number of at least 1",
        ),
        (
            f"{SHAPE} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
            " --microbatch-group-size-per-virtual-pipeline-stage 4",
            "4 is not modelled, only 2",
        ),
        (
            f"{SHAPE} --num-experts 8 --moe-layer-freq 2",
            "--moe-layer-freq: '2' must be 1, or as ([0]*3+[1]*58) for all layers",
        ),
        (
            f"{SHAPE} --num-experts 8 --moe-layer-freq ([0]*1+[1]*2)",
            "--moe-layer-freq: '([0]*1+[1]*2)' must be 1, or as",
        ),
        (f"{SHAPE} --num-experts 8 --moe-router-dtype fp64", "fp64 is not modelled, only fp32"),
        (f"{SHAPE} --num-experts 8 --moe-input-jitter-eps 0.1", "--moe-input-jitter-eps"),
        (
            f"{SHAPE} --fine-grained-activation-offloading",
            "activations of modules on the host: not modelled",
        ),
        (f"{SHAPE} --num-layers $LAYERS", "'$LAYERS': must be written out"),
        (f"{SHAPE} --num-layers 0", "--num-layers: '0' must be a whole number of at least 1"),
        (f"{SHAPE} --hidden-size 64 65", "--hidden-size: has 2 values, must have one"),
        (f"{SHAPE} --bf16 yes", "--bf16: 'yes' must not be there: it is a flag"),
        (f"{SHAPE} --bf16 --fp16", "--bf16: contradicts --fp16"),
        (f"{SHAPE} --normalization none", "'none' must be LayerNorm or RMSNorm"),
        (f"{SHAPE} --lr nan", "--lr: 'nan' must be a number"),
        (f"{SHAPE} --recompute-granularity full --recompute-num-layers 4", "only 1"),
        (
            f"{SHAPE} --exp-avg-dtype bf16",
            "--exp-avg-dtype: 'bf16' needs use_precision_aware_optimizer",
        ),
        ("hello", "'hello': must be an argument"),
        ("--num-layers '3", "no command line: no closing quotation"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_argument(words: str, why: str) -> None:
    said = refusal(words)
    assert said.startswith("zero.megatron_arguments: ")
    assert why in said
    assert "\n" not in said


def test_what_counts_for_a_layer_is_nothing_without_a_pipeline() -> None:
    words = f"{SHAPE} --account-for-embedding-in-pipeline-split"
    assert read(words) == read(SHAPE)
    assert left(words) == ()


def test_without_the_distributed_optimizer_it_is_stage_0() -> None:
    assert read(SHAPE).zero.stage == 1
    words = SHAPE.replace("--use-distributed-optimizer ", "")
    assert read(words).zero.stage == 0


def test_products_beside_collectives_of_tokens_are_read() -> None:
    cut = f"{SHAPE} --tensor-model-parallel-size 2 --sequence-parallel"
    for words, overlaps in ((cut, False), (f"{cut} --tp-comm-overlap", True)):
        assert read(words).zero.model_dump()["megatron"]["tp_comm_overlap"] is overlaps
        assert left(words) == ()
    options = read(f"{cut} --tp-comm-overlap --disable-tp-comm-overlap-rs").zero.model_dump()
    assert options["megatron"]["tp_comm_overlap_rs"] is False
    # its file is not read: a scenario says the same, or nothing does
    filed = f"{cut} --tp-comm-overlap --tp-comm-overlap-cfg ub.yaml"
    assert "'ub.yaml' is not read; write zero.megatron.tp_comm_overlap_cfg" in refusal(filed)
    same = (
        "tp_comm_overlap=true",
        "sequence_parallel=true",
        "tp_comm_overlap_cfg.qkv_dgrad.num_sm=4",
    )
    said = read(filed, *(f"zero.megatron.{each}" for each in same)).zero.model_dump()["megatron"]
    assert said["tp_comm_overlap_cfg"]["qkv_dgrad"]["num_sm"] == 4
    assert left(f"{cut} --tp-comm-overlap-cfg ub.yaml") == ()


@pytest.mark.parametrize("cut", ["", "--tensor-model-parallel-size 2", "--sequence-parallel"])
def test_products_beside_collectives_need_tokens_that_are_cut(cut: str) -> None:
    # validate_args turns sequence parallelism off where there are no tensor ranks
    assert refusal(f"{SHAPE} {cut} --tp-comm-overlap") == (
        "zero.megatron_arguments: --tp-comm-overlap: needs --sequence-parallel and tensor ranks"
    )


@pytest.mark.parametrize(
    ("words", "is_beside"),
    [
        ("", False),
        ("--tensor-model-parallel-size 2", True),
        ("--tensor-model-parallel-size 2 --no-async-tensor-model-parallel-allreduce", False),
        ("--tensor-model-parallel-size 2 --sequence-parallel", True),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel "
            "--no-async-tensor-model-parallel-allreduce",
            True,  # of sums alone
        ),
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", False),
    ],
)
def test_sums_over_tensor_ranks_are_beside_products_unless_it_is_turned_off(
    words: str, *, is_beside: bool
) -> None:
    options = read(f"{SHAPE} {words}").zero.model_dump()["megatron"]
    assert options["async_tensor_model_parallel_allreduce"] is is_beside
    assert left(f"{SHAPE} {words}") == ()


def test_products_add_gradients_unless_it_is_turned_off() -> None:
    for words, adds in ((SHAPE, True), (f"{SHAPE} --no-gradient-accumulation-fusion", False)):
        options = read(words).zero.model_dump()["megatron"]
        assert options["gradient_accumulation_fusion"] is adds
        assert left(words) == ()


def test_whether_messages_are_sent_in_parts_is_the_version_s_unless_it_is_turned_off() -> None:
    parts = "zero.megatron.scatter_gather_tensors_in_pipeline=true"
    off = f"{SHAPE} --no-scatter-gather-tensors-in-pipeline"
    assert left(off) == ()
    assert read(SHAPE, parts).zero.model_dump()["megatron"]["scatter_gather_tensors_in_pipeline"]
    assert "true contradicts megatron_arguments" in refusal(off, parts)


def test_a_scenario_that_says_otherwise_is_a_contradiction() -> None:
    assert refusal(SHAPE, "model.layers=3") == (
        "model.layers: 3 contradicts megatron_arguments, whose --num-layers means 2"
    )


def test_recomputation_and_flags_of_the_optimizer_are_read() -> None:
    words = f"{SHAPE} --recompute-granularity full --recompute-method uniform --bf16"
    words += " --tensor-model-parallel-size 2 --distribute-saved-activations --grad-reduce-in-bf16"
    found = read(f"{words} --clip-grad 0 --lr 1e-4 --adam-beta2 0.95 --ddp-bucket-size 1000")
    assert found.activations.checkpointing == "full"
    assert found.activations.partition
    assert found.train.clip_norm is None
    assert (found.train.learning_rate, found.train.model_dump()["beta2"]) == (1e-4, 0.95)
    options = found.zero.model_dump()["megatron"]
    assert (options["bucket_size"], options["grad_reduce_in_fp32"]) == (1000, False)
    fused = f"{words} --save /x --log-interval 3 --cross-entropy-loss-fusion"
    assert left(f"{fused} --cross-entropy-fusion-impl te") == ()
    assert read(f"{fused} --cross-entropy-fusion-impl te").train.loss == "fused"
    assert "--cross-entropy-loss-fusion: is modelled with --cross-entropy-f" in refusal(fused)


@pytest.mark.parametrize(
    "words",
    [
        "--checkpoint-activations",
        "--checkpoint-activations --checkpoint-num-layers 1",
        "--activations-checkpoint-method uniform --activations-checkpoint-num-layers 1",
        "--activations-checkpoint-granularity full --activations-checkpoint-method uniform",
    ],
)
def test_old_names_of_recomputation_are_followed(words: str) -> None:
    found = read(f"{SHAPE} {words}")
    scores = "--attention-backend unfused"  # versions with these names store them
    now = f"--recompute-granularity full --recompute-method uniform {scores}"
    assert found == read(f"{SHAPE} {now}")
    assert found.activations.checkpointing == "full"


def test_both_names_of_one_argument_contradict_each_other() -> None:
    words = f"{SHAPE} --activations-checkpoint-method uniform --recompute-method block"
    assert "--activations-checkpoint-method: contradicts --recompute-method" in refusal(words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--deepspeed --zero-stage 1", "--deepspeed: needs --deepspeed_config FILE, which has its"),
        (
            "--deepspeed --deepspeed_config ds.json",
            "--deepspeed: without --no-pipeline-parallel, DeepSpeed's engine for pipelines trains",
        ),
        (
            "--deepspeed --deepspeed_config ds.json --pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size: 2: pipelines of DeepSpeed are not modelled; set it to",
        ),
        (
            "--deepspeed --deepspeed_config ds.json --no-pipeline-parallel --overlap-grad-reduce",
            "--overlap-grad-reduce: not modelled; remove it",
        ),
        ("--sft", "--sft: fine-tuning on packed samples: not modelled"),
        (
            "--global-batch-size 64 --rampup-batch-size 8 8 1000",
            "--rampup-batch-size: 8 8 1000: a batch that grows is not modelled; remove it to "
            "simulate a step of --global-batch-size, or set that to the batch of another step",
        ),
        ("--step-batch-size-schedule 0:8", "--step-batch-size-schedule: 0:8: a batch that grows"),
        ("--zero-stage 1", "--zero-stage: 1 is not modelled; remove it to run without it"),
        ("--fp8-format e5m2", "--fp8-format: 'e5m2' must be e4m3 or hybrid"),
        ("--fp8-format e4m3 --fp8-recipe custom", "--fp8-recipe: custom is not modelled"),
        ("--fp8-format e4m3 --fp4-format e2m1", "--fp4-format: contradicts --fp8-format"),
        ("--fp8-format e4m3 --no-fp8-wgrad", "--no-fp8-wgrad: not modelled; remove it"),
        ("--fp8-format e4m3 --fp8-output-proj", "--fp8-output-proj: not modelled; remove it"),
        ("--glu-activation reglu", "--glu-activation: 'reglu' must be swiglu or geglu"),
        ("--position-embedding-type alibi", "'alibi' must be learned_absolute or rope"),
        ("--no-position-embedding", "--no-position-embedding: a model without positions"),
        ("--empty-unused-memory-level 1", "--empty-unused-memory-level: 1 is not modelled"),
        ("--batch-size 4", "--batch-size: the global batch of versions before 2020"),
        ("--model-parallel-size 4", "--model-parallel-size: an old name (write --tensor-model"),
        (
            "--transformer-impl local --no-masked-softmax-fusion",
            "--no-masked-softmax-fusion: stores more of attention",
        ),
        ("--no-bias-swiglu-fusion", "--no-bias-swiglu-fusion: not modelled; remove it"),
        ("--main-params-dtype fp16", "--main-params-dtype: fp16 is not modelled"),
        (
            "--reuse-grad-buf-for-mxfp8-param-ag",
            "--reuse-grad-buf-for-mxfp8-param-ag: needs --fp8-param-gather",
        ),
        ("--data-parallel-random-init", "--data-parallel-random-init: not modelled"),
        ("--logits-load-dir /x", "--logits-load-dir: /x is not modelled"),
        ("--attention-dropout 0.0", "--attention-dropout: 0.0 must be 0.1, as --hidden-dropout"),
        ("--DDP-impl torch", "--DDP-impl: 'torch' must be local"),
        ("--an-argument-of-a-fork 3", "--an-argument-of-a-fork: 3 is not modelled"),
    ],
)
def test_an_argument_that_nobody_follows_is_refused(words: str, why: str) -> None:
    assert why in refusal(f"{SHAPE} {words}")


def test_paths_may_be_variables_and_nothing_that_changes_a_step() -> None:
    paths = "--save $1 --data-path 0.5 ${DATA} --tensorboard-dir=${LOGS}"
    assert read(f"{SHAPE} {paths}") == read(SHAPE)
    for words in ("--num-layers $N", "$ARGS", "--data-path ${DATA} ${ARGS}", "--save-$N 3"):
        assert "must be written out, a variable has no value" in refusal(f"{SHAPE} {words}")
    assert "--num-layers: '$N': must be written out" in refusal(f"{SHAPE} --num-layers $N")


@pytest.mark.parametrize(
    ("words", "attention"),
    [
        ("", "flash2"),
        ("--transformer-impl local", "plain"),
        ("--transformer-impl local --use-flash-attn", "flash2"),
        ("--transformer-impl transformer_engine --DDP-impl local", "flash2"),
        ("--DDP-impl local", "plain"),
        ("--DDP-impl local --use-flash-attn", "flash2"),
        ("--data-impl mmap --use-flash-attn-v2", "flash2"),
        ("--data-impl mmap", "plain"),
        ("--attention-backend flash --no-masked-softmax-fusion", "flash2"),
    ],
)
def test_scores_are_stored_by_the_local_implementation_of_old_versions(
    words: str, attention: str
) -> None:
    assert read(f"{SHAPE} {words}").model.attention == attention


@pytest.mark.parametrize(
    "words",
    [
        "--use-rotary-position-embeddings",
        "--use-rotary-position-embeddings --no-position-embedding",
        "--position-embedding-type rotary",
        "--position-embedding-type rope --no-position-embedding",
    ],
)
def test_rotary_positions_are_read_under_their_old_names(words: str) -> None:
    found = read(f"{SHAPE} --max-position-embeddings 16 {words}").model
    assert found.positions == "rotary"
    assert found.position_embeddings is None


@pytest.mark.parametrize("gate", ["swiglu", "geglu"])
def test_a_gate_of_megatron_deepspeed_is_followed(gate: str) -> None:
    found = read(f"{SHAPE} --glu-activation {gate} --ffn-hidden-size 96").model
    assert (found.activation, found.intermediate_size) == (gate, 96)


@pytest.mark.parametrize(
    ("hidden", "width"),
    # `validate_args`: two thirds of four hidden sizes, and of that the multiple of 64 below.
    [(64, 128), (96, 256), (4096, 10880)],
)
def test_a_gated_mlp_without_a_width_has_two_thirds_of_four_hidden_sizes(
    hidden: int, width: int
) -> None:
    words = f"{SHAPE} --hidden-size {hidden}"
    assert read(f"{words} --swiglu").model.intermediate_size == width
    assert read(words).model.intermediate_size in {None, 4 * hidden}
    given_width = read(f"{words} --swiglu --ffn-hidden-size 192").model.intermediate_size
    assert given_width == 192


def test_a_bucket_without_a_size_has_a_million_elements_for_each_rank_and_at_least_40() -> None:
    overlapped = Megatron(overlap_grad_reduce=True)
    found = {data: overlapped.bucket_elements(data=data) for data in (1, 40, 41, 512)}
    assert found == {1: 40_000_000, 40: 40_000_000, 41: 41_000_000, 512: 512_000_000}
    assert overlapped.but(bucket_size=1000).bucket_elements(data=512) == 1000
    assert Megatron(overlap_grad_reduce=False).bucket_elements(data=512) is None


@pytest.mark.parametrize(
    ("words", "float8", "float4"),
    [
        ("--fp8-format hybrid", "delayed", None),
        ("--fp8-hybrid --fp8-interval 1 --fp8-amax-history-len 1024", "delayed", None),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "tensorwise", None),
        ("--fp8-format e4m3 --fp8-recipe blockwise --tp-only-amax-red", "blockwise", None),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8", None),
        ("--fp4-format e2m1 --fp4-recipe nvfp4", None, "nvfp4"),
        ("--fp8-recipe mxfp8", None, None),
    ],
)
def test_formats_of_products_are_read(words: str, float8: str | None, float4: str | None) -> None:
    found = read(f"{SHAPE} {words}").train
    assert (found.float8, found.float4) == (float8, float4)


def test_first_and_last_layers_may_stay_in_16_bits() -> None:
    words = f"{SHAPE} --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"
    found = read(f"{words} --num-layers-at-end-in-bf16 2").train
    assert (found.num_layers_at_start_in_bf16, found.num_layers_at_end_in_bf16) == (1, 2)
    found = read(f"{words} --num-layers-at-start-in-bf16 0").train
    assert (found.num_layers_at_start_in_bf16, found.num_layers_at_end_in_bf16) == (0, 1)


BY_DEEPSPEED = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 4 --seq-length 16"
    " --num-key-value-heads 2 --vocab-size 1000 --micro-batch-size 2 --global-batch-size 64"
    " --tensor-model-parallel-size 2 --bf16 --swiglu --normalization rmsnorm --clip-grad 1.0"
    " --disable-bias-linear --use-rotary-position-embeddings --checkpoint-activations"
    " --deepspeed --deepspeed_config ds.json --zero-stage 3 --no-pipeline-parallel"
    " --deepspeed-activation-checkpointing"
)


def test_a_command_line_of_megatron_deepspeed_is_trained_by_its_configuration(
    tmp_path: Path,
) -> None:
    (tmp_path / "scenario.toml").write_text(TEXT, "utf-8")
    (tmp_path / "arguments.txt").write_text(f"deepspeed pretrain_gpt.py {BY_DEEPSPEED}", "utf-8")
    said = {"stage": 3, "stage3_max_live_parameters": 77}
    engine = {"zero_optimization": said, "bf16": {"enabled": True}, "gradient_clipping": 0.5}
    (tmp_path / "ds.json").write_text(json.dumps(engine), "utf-8")
    loaded = load(tmp_path / "scenario.toml")
    strategy = loaded.strategy
    assert strategy.zero.emulate == DeepSpeed(stage3_max_live_parameters=77)
    assert (strategy.zero.stage, strategy.parallel.tensor, strategy.parallel.data) == (3, 2, 4)
    assert strategy.train.gradient_accumulation_steps == 64 // (2 * 4)
    assert strategy.train.clip_norm == 0.5
    assert strategy.activations.checkpointing == "full"
    assert read(BY_DEEPSPEED).model.key_value_heads == 2
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}', "utf-8")
    with pytest.raises(MistakeError, match=r"zero\.stage: 3 contradicts deepspeed_config"):
        load(tmp_path / "scenario.toml").strategy  # noqa: B018


def test_megatron_deepspeed_stores_scores_unless_it_has_flash_attention() -> None:
    assert read(BY_DEEPSPEED).model.attention == "plain"
    assert read(f"{BY_DEEPSPEED} --use-flash-attn-v2").model.attention == "flash2"
