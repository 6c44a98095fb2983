"""Published exchanges and layers of experts: rows as they are printed, and their predictions."""

from pathlib import Path

import pytest

from zsim.mistake import MistakeError
from zsim_lab.answer.expert_validation import validate_experts
from zsim_lab.rows.expert_tables import DispatchRow, LayerRow
from zsim_lab.rows.measurements import expert_rows

# NVIDIA-NeMo/Automodel, docs/deepep_vs_hybridep_benchmark.md, sections 3.1 and 3.2;
# deepseek-ai/DeepEP, docs/README_Hybrid-EP.md at 94a9f8f, "B200 Platform", and docs/legacy.md.
# The last two rows are not modelled.
DISPATCH = """\
source,table,library,gpu,gpus_per_node,nodes,ep_ranks,op,dtype,tokens_per_rank,hidden,topk,experts_per_rank,routing,kernel_kind,timing,num_sms,bandwidth_GBps
automodel,3.1,DeepEP V1,H100 80GB,8,1,8,dispatch,BF16,4096,7168,8,8,mock,normal,kernel only,24,335
automodel,3.2,HybridEP,H100 80GB,8,2,16,dispatch,BF16,4096,7168,8,8,mock,normal,kernel only,8,85.7
deepep,B200 Platform,DeepEP V1,B200,8,1,8,combine,BF16,4096,7168,8,8,random,normal,Torch API,24,420
deepep,normal,DeepEP V1,H800,8,8,64,dispatch,FP8,4096,7168,8,4,"top-4 groups, top-8",normal,,20,51
deepep,few,DeepEP V1,H800,8,8,64,dispatch,FP8,128,7168,8,4,top-8,low latency,,20,40
other,any,OtherEP,H100,8,1,8,dispatch,BF16,4096,7168,8,8,mock,normal,kernel only,24,100
"""

# NVIDIA/Megatron-LM at d98e8a64, moe_perf/baseline.json.
LAYERS = """\
source,case,gpu,n_gpus,seq_len,hidden,moe_ffn,num_experts,topk,score,router_groups,group_topk,ep,dispatcher,precision,forward_ms,backward_ms
megatron,deepseek_a2a,H100,8,4096,7168,2048,32,8,sigmoid,8,4,8,alltoall,BF16,7.119,10.483
megatron,deepseek_deepep,H100,8,4096,7168,2048,32,8,sigmoid,8,4,8,flex:deepep,BF16,5.682,9.055
megatron,hybridep,H100,8,4096,7168,2048,32,8,sigmoid,8,4,8,flex:hybridep,FP8 blockwise,5.143,7.687
marin,other,GB200,64,16384,5120,2560,128,4,,,,64,collective,MXFP8,38.35,34.65
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a2a_expert_dispatch.csv").write_text(DISPATCH, "utf-8")
    (tmp_path / "moe_layer_bench.csv").write_text(LAYERS, "utf-8")
    return tmp_path


def test_rows_are_read_as_they_are_printed(folder: Path) -> None:
    rows, left = expert_rows(folder)["a2a_expert_dispatch"]
    first, hybrid, fitted, grouped = rows
    assert isinstance(first, DispatchRow)
    assert isinstance(hybrid, DispatchRow)
    assert isinstance(fitted, DispatchRow)
    assert isinstance(grouped, DispatchRow)
    assert (first.experts, first.groups, first.domains, first.bytes_per_s) == (64, 1, 1, 335e9)
    assert (hybrid.domains, hybrid.is_called, hybrid.is_fitted) == (2, False, False)
    assert (fitted.returns, fitted.is_called, fitted.is_fitted) == (True, True, True)
    assert (grouped.is_h800, grouped.groups, grouped.top_groups) == (True, 8, 4)
    assert grouped.element_bytes == 1 + 4 / 128
    assert [each.reason for each in left] == [
        "kernels for few tokens are not modelled",
        "OtherEP is not modelled",
    ]


def test_layers_are_read_without_those_of_other_tests(folder: Path) -> None:
    rows, left = expert_rows(folder)["moe_layer_bench"]
    assert [each.library for each in rows if isinstance(each, LayerRow)] == [
        "",
        "deepep",
        "hybridep",
    ]
    assert [each.reason for each in left] == ["other: not a layer of this test"]


def test_published_exchanges_and_layers_are_predicted(folder: Path) -> None:
    found = {each.name: each for each in validate_experts(folder).every}
    dispatch, layers = found["a2a_expert_dispatch"], found["moe_layer_bench"]
    assert max(abs(each.off) for each in dispatch.rows) < 0.12
    assert [each.is_kept for each in dispatch.rows] == [True, True, False, True]
    assert max(abs(each.off) for each in layers.rows) < 0.1


def test_errors_are_printed_by_table_and_library(folder: Path) -> None:
    text = validate_experts(folder).text()
    assert "a2a_expert_dispatch: 4 of 6 rows are modelled" in text
    assert "moe_layer_bench: 6 of 7 rows are modelled" in text
    assert "deepep, h800" in text


def test_a_folder_without_such_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MistakeError, match=r"holds none of a2a_expert_dispatch\.csv"):
        validate_experts(tmp_path)
