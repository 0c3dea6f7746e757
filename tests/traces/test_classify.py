"""What a kernel is: names seen in the wild, and the names that look like something else."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from stepscope.core.errors import BadInputError, UsageError
from stepscope.formats import classify as classes
from stepscope.formats.classify import CATEGORIES, classify, classify_host_communication, classify_names, labels
from stepscope.formats.timeline import ANNOTATION, COPY, DEVICE_ANNOTATION, KERNEL, RUNTIME, SET

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "traces"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not beside the checkout")

EXPECTED = {
    "communication": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_f32",
        "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
        "ncclKernelAllGatherCtranDirect",
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        "rccl_main_kernel",
        "mscclKernel_Sum_half_LL(ncclDevComm*)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)",
        "void sglang::cross_device_reduce_2stage<half, 8>(x)",
        "void aiter::cross_device_reduce_2stage_naive<half, 8>(x)",
        "one_shot_all_reduce_kernel",
        "two_shot_all_reduce_kernel_inplace",
        "multimem_all_reduce_kernel",
        "multimem_one_shot_reduce_out_kernel",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>(x)",
        "void mscclpp::collective::allgather<true>(x)",
        "allreduceAllPairs",
        "void allgather2<true>(x)",
        "void deep_ep::internode_ll::dispatch<true, 7168>(x)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 8>(x)",
        "void pplx::dispatchKernel<4>(x)",
        "moeA2ADispatchKernel",
        "nvshmemi_transfer_rma",
        "oneccl_allreduce_pcie",
        "all-reduce.17",
        "%all-gather-start.2",
        "collective-permute-done.1",
        "send-done.4",
    ],
    "copy": [
        "Memcpy HtoD (Pageable -> Device)",
        "[CUDA memcpy Device-to-Host]",
        "__amd_rocclr_copyBuffer",
        "copy-start.3",
    ],
    "set": ["Memset (Device)", "[CUDA memset]", "__amd_rocclr_fillBufferAligned"],
    "moe": [
        "fused_moe_kernel",
        "void vllm::moe::topkGatingSoftmax<(int)4, (int)8>(const float *)",
        "void vllm::moe::moe_align_block_size_kernel<int>(x)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<int> > >(x)",
        "_grouped_gemm_forward_kernel",
        "deep_ep::layout::get_dispatch_layout<256>(x)",
    ],
    "attention": [
        "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128> >(x)",
        "flash_fwd_mla_combine_kernel",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<float>::Params)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x> > >(x)",
        "void vllm::paged_attention_v1_kernel<half>(x)",
        "void vllm::reshape_and_cache_flash_kernel<half>(x)",
        "_attn_fwd",
        "kernel_unified_attention_2d",
        "triton_tem_fused_flex_attention_0",
    ],
    "convolution": [
        "cudnn_volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
        "sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x256x32_g1__5x_cudnn",
        "void cutlass_cudnn_train::Kernel<cutlass_tensorop_s1688wgrad_optimized_tf32_256x64_16x4_nhwc_align4>(x)",
        "void cutlass__5x_cudnn::Kernel<cutlass__5x_cudnn::reduction::kernel::ReduceSplitK<x> >(x)",
        "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblockE",
        "void fft2d_r2c_32x32<float, false, 0u, false>(x)",
        "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3>(x)",
    ],
    "gemm": [
        "ampere_sgemm_128x64_nn",
        "nvjet_sm90_tst_96x64_64x8_2x4_h_bz_NTN",
        "Cijk_Ailk_Bljk_SB_MT64x64x16.kd",
        "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(x)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<Sm90RowBroadcast<0> > >(x)",
        "void splitKreduce_kernel<32, 16>(x)",
        "void dot_kernel<float, 128>(x)",
        "void reduce_1Block_kernel<float, 128>(x)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int>(x)",
        "triton_tem_fused_addmm_12",
        "triton_mm",
    ],
    "embedding": [
        "void split_embedding_codegen_forward_unweighted_kernel<float>(x)",
        "void at::native::(anonymous namespace)::EmbeddingBag_updateOutputKernel_sum_mean<float>(x)",
        "void bounds_check_indices_kernel<long>(x)",
        "void fbgemm_gpu::permute_2D_data_kernel<false>(x)",
        "void at::native::(anonymous namespace)::krn_partial_segment_offset<long>(x)",
    ],
    "norm": [
        "std::enable_if<T2>(int)0&&vllm::_typeConvert<T1>::exists, void>::type vllm::fused_add_rms_norm_kernel<x>(T1)",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(x)",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(x)",
        "triton_per_fused_native_layer_norm_3",
        "triton_red_fused__to_copy_mean_mul_pow_rsqrt_0",
    ],
    "softmax": [
        "void (anonymous namespace)::softmax_warp_forward<float>(x)",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>(x)",
        "triton_red_fused__log_softmax_nll_loss_forward_7",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<List<4>, FusedAdamMathFunctor<float> >(x)",
        "adamw_kernel",
    ],
    "sort": [
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<x>(x)",
        "void cub::DeviceScanKernel<x>(x)",
        "void at::native::sbtopk::gatherTopK<float>(x)",
        "void at::native::mbtopk::radixFindKthValues<float>(x)",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(x)",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<Metadata<1>, LpNormFunctor<float> >(x)",
        "triton_red_fused_all_reduce_sum_2",
        "void at::native::(anonymous namespace)::max_pool_forward_nchw<float>(x)",
    ],
    "elementwise": [
        "triton_poi_fused_add_all_reduce_4",
        "triton_poi_fused_addmm_relu_1",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>(x)",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(Iterator&)::{lambda()#1}>(x)",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, (bool)1>(x)",
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, (bool)1>(x)",
        "void at::native::vectorized_gather_kernel<16, long>(x)",
        "void fbgemm_gpu::(anonymous namespace)::_compute_FP8_quantize_cuda_kernel<float>(x)",
        "void at::native::vectorized_elementwise_kernel<4, cutlass::bfloat16_t>(x)",
        "loop_add_fusion.3",
    ],
    "other": [
        "at::cuda::(anonymous namespace)::spin_kernel(long)",
        "my_kernel",
        "ncclGroupStart",
        "hipLaunchKernel",
        "",
    ],
}


@pytest.mark.parametrize("category", EXPECTED)
def test_names_of_each_class(category: str) -> None:
    found = {
        name: CATEGORIES[index]
        for name, index in zip(EXPECTED[category], classify_names(EXPECTED[category]), strict=True)
    }
    assert found == dict.fromkeys(EXPECTED[category], category)


def test_kind_decides_before_the_name() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    assert classify(nccl, kind=COPY) == classes.COPY
    assert classify("Memset (Device)", kind=SET) == classes.SET
    assert classify(nccl, kind=KERNEL) == classes.COMMUNICATION


def test_annotations_and_calls_are_no_device_work() -> None:
    """`nccl:all_reduce` stands beside every NCCL kernel; counted, it would double communication."""
    for kind in (ANNOTATION, DEVICE_ANNOTATION, RUNTIME):
        assert classify("nccl:all_reduce", kind=kind) == -1


def test_collective_arguments_decide_before_the_name() -> None:
    assert classify("my_kernel", kind=KERNEL, collective="allreduce") == classes.COMMUNICATION
    assert classify("my_kernel", kind=KERNEL) == classes.OTHER


def test_fused_kernels_carry_two_labels() -> None:
    assert labels("allreduce_fusion_kernel_oneshot_lamport") == ("communication", "norm")
    assert labels("fused_moe_kernel") == ("moe", "gemm")
    assert labels("void deep_ep::intranode::dispatch<8>(x)") == ("communication", "moe")
    assert labels("void vllm::reshape_and_cache_flash_kernel<half>(x)") == ("attention", "kv_cache_write")
    assert labels("nothing_known") == ("other",)


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("gloo:all_reduce", "all_reduce"),
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::_allgather_base_", "all_gather_into_tensor"),
        ("c10d::alltoall_base_", "all_to_all_single"),
        ("c10d::broadcast_", "broadcast"),
        ("c10d::send", "send"),
        ("nccl:all_reduce", None),
        ("ncclGroupStart", None),
        ("aten::add", None),
    ],
)
def test_communication_on_the_host(name: str, collective: str | None) -> None:
    assert classify_host_communication(name) == collective


def test_index_constants() -> None:
    assert CATEGORIES[classes.COMMUNICATION] == "communication"
    assert CATEGORIES[classes.OTHER] == "other"
    assert [CATEGORIES[getattr(classes, name.upper())] for name in CATEGORIES] == list(CATEGORIES)


def test_every_rule_has_a_reason() -> None:
    rules = classes.find_classifier().rules
    assert len(rules) > 40
    assert all(rule.reason for rule in rules)
    assert classes.find_classifier().explain("fused_moe_kernel").startswith("expert matrix products")


def test_own_rules_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.toml"
    own.write_text("[[rule]]\ncategory = 'attention'\npattern = '^my_'\nalso = ['mine']\n")
    monkeypatch.setenv(classes.CLASSIFIER_VARIABLE, str(own))
    assert CATEGORIES[classify("my_kernel", kind=KERNEL)] == "attention"
    assert labels("my_kernel") == ("attention", "mine")
    assert CATEGORIES[classify("ampere_sgemm_128x64_nn", kind=KERNEL)] == "gemm"
    assert classes.find_classifier().identity.startswith(f"{classes.CLASSIFIER_VERSION}+")
    own.write_text("[[rule]]\ncategory = 'moe'\npattern = '^my_'\n")
    assert CATEGORIES[classify("my_kernel", kind=KERNEL)] == "moe", "a changed file is read again"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule", "not TOML"),
        ("a = 1", "nothing else"),
        ("rule = [1]", "a rule is a table"),
        ("[[rule]]\ncategory = 'gem'\npattern = 'x'", "there is no category 'gem'"),
        ("[[rule]]\ncategory = 'gemm'\npatern = 'x'", "there is no key of a rule 'patern'"),
        ("[[rule]]\ncategory = 'gemm'", "either"),
        ("[[rule]]\ncategory = 'gemm'\npattern = '('", "not a regular expression"),
        ("[[rule]]\ncategory = 'gemm'\npattern = 'x'\nalso = 'y'", "list of words"),
    ],
)
def test_bad_rules_are_refused(text: str, message: str) -> None:
    with pytest.raises((BadInputError, UsageError), match=re.escape(message)) as caught:
        classes.parse_rules(text, where="own.toml")
    assert "own.toml" in (caught.value.where or "")


def test_missing_rules_file(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot read the classifier rules"):
        classes.find_classifier(tmp_path / "absent.toml")


def _kernels(path: Path) -> dict[str, float]:
    times: dict[str, float] = defaultdict(float)
    with gzip.open(path) as file:
        for event in json.load(file)["traceEvents"]:
            if str(event.get("cat")).lower() == "kernel":
                times[event["name"]] += event["dur"]
    return times


@needs_shared
def test_almost_nothing_is_left_unclassified() -> None:
    """Every Kineto trace at hand: a share of kernel time in `other` that would matter means a missing rule."""
    seen = 0
    for path in sorted(SHARED.rglob("*.json.gz")):
        if (
            "et.json" in path.name
            or path.parent.name == "et"
            or "dlrm_eg" in path.name
            or "cuda_event_sync" in str(path)
        ):
            continue  # execution traces; and two tests of events whose only kernels spin
        times = _kernels(path)
        share = defaultdict(float)
        for (_, time), index in zip(times.items(), classify_names(list(times)), strict=True):
            share[CATEGORIES[index]] += time / sum(times.values())
        seen += 1
        assert share["other"] < 0.001, f"{path}: {share['other']:.2%} of {len(times)} kernels"
        assert {"ncclKernel" in name or "ncclDev" in name for name in times} >= {share["communication"] > 0}
    assert seen > 15


@needs_shared
@pytest.mark.parametrize(("file", "nccl"), [("EPLB_off.csv", 40.45), ("EPLB_on.csv", 41.22)])
def test_nccl_share_of_a_served_mixture_of_experts(file: str, nccl: float) -> None:
    units = {"s": 1.0, "ms": 1e-3, "μs": 1e-6, "ns": 1e-9}
    with (SHARED / "public" / "nsys" / file).open(encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    times = [float(value) * units[unit] for value, unit in (row["Total Time"].split() for row in rows)]
    share = defaultdict(float)
    for index, time in zip(classify_names([row["Name"] for row in rows]), times, strict=True):
        share[CATEGORIES[index]] += 100 * time / sum(times)
    assert share["communication"] == pytest.approx(nccl, abs=0.01)
    assert share["moe"] == pytest.approx(49.1, abs=0.1)
    assert share["other"] < 0.1
