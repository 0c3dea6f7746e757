"""One kernel, one name, whichever profiler wrote it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.formats.classify import base_name, is_wrapper, normal_name, short_name

SAME = [
    (
        "void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float const> > >(int)",
        "void dot_kernel<float, (int)128, (int)0, cublasDotParams<cublasGemvTensorStridedBatched<const float>>>(T4)",
    ),
    (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
    ),
    (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, true>(float*, int)",
        "void <unnamed>::softmax_warp_forward<float, float, float, (int)7, (bool)0, (bool)1>(T1 *, int)",
    ),
    (
        "void f<4, g(I&)::{lambda()#3}::operator()() const::{lambda(int)#2}, A<char, 2ul> >(int)",
        "void f<(int)4, g(I &)::[lambda() (instance 3)]::operator ()() const::[lambda(int) (instance 2)], A<char, 2>>",
    ),
]

BASES = [
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(x)", "at::native::reduce_kernel"),
    ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, 7>(P)", "internal::gemvx::kernel"),
    (
        "std::enable_if<T2>(int)0&&vllm::_typeConvert<T1>::exists, void>::type vllm::fused_add_rms_norm_kernel<T, 8>()",
        "vllm::fused_add_rms_norm_kernel",
    ),
    ("at::cuda::(anonymous namespace)::spin_kernel(long)", "at::cuda::(anonymous namespace)::spin_kernel"),
    ("nvjet_sm90_tst_128x128_64x6_4x2_h_bz_NTT", "nvjet_sm90_tst_128x128_64x6_4x2_h_bz_NTT"),
    ("_ZN2at6native13reduce_kernelILi512ELi1EEEvT_", "at::native::reduce_kernel"),
    ("_Z11spin_kernell", "spin_kernel"),
    ("Cijk_Ailk_Bljk_SB_MT64x64x16.kd", "Cijk_Ailk_Bljk_SB_MT64x64x16"),
    ("", ""),
]

SHORT = [
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, int>(int)",
        "vectorized_elementwise_kernel<CUDAFunctor_add>",
    ),
    ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64>(x)", "cutlass_80_tensorop_s1688gemm_64x64"),
    (
        "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblockE",
        "cutlass_cudnn_train::Kernel<ImplicitGemmConvolution>",
    ),
    ("void at::native::(anonymous namespace)::max_pool_forward_nchw<float>(int)", "max_pool_forward_nchw"),
]


@pytest.mark.parametrize(("kineto", "nsys"), SAME)
def test_both_profilers_give_one_name(kineto: str, nsys: str) -> None:
    assert normal_name(kineto) == normal_name(nsys)


@pytest.mark.parametrize(("name", "base"), BASES)
def test_base_name(name: str, base: str) -> None:
    assert base_name(name) == base


@pytest.mark.parametrize(("name", "short"), SHORT)
def test_short_name(name: str, short: str) -> None:
    assert short_name(name) == short


def test_wrappers_are_known() -> None:
    assert is_wrapper("void cutlass::Kernel2<cutlass_80_simt>(x)")
    assert not is_wrapper("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4>(x)")


@given(st.text(alphabet="_ZNab12SILE<>(){}[]:, *&-lambda", max_size=200))
def test_any_text_has_a_name(name: str) -> None:
    """Names come from files: odd brackets and lengths beyond the end are no reason to fail."""
    assert isinstance(short_name(name), str)
    assert base_name(normal_name(name)) is not None


def test_a_huge_name_costs_little() -> None:
    assert len(normal_name("void f<" * 100_000)) <= 4096
    assert len(short_name("_ZN" + "9" * 100_000)) <= 4200
