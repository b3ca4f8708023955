"""Numbers and layouts of ROCm's libraries in the engine's tables, against the declarations in ROCm's Python bindings.

Needs no ROCm: `pip install rocm-bindings-hip rocm-bindings-libraries rocm-bindings-systems`.
"""

from __future__ import annotations

import ctypes
import enum
import re
from pathlib import Path

import pytest

BINDINGS = "needs rocm-bindings-hip, rocm-bindings-libraries and rocm-bindings-systems"
hip = pytest.importorskip("rocm.bindings.hip", reason=BINDINGS)
hipblas = pytest.importorskip("rocm.bindings.hipblas", reason=BINDINGS)
hipblaslt = pytest.importorskip("rocm.bindings.hipblaslt", reason=BINDINGS)
rccl = pytest.importorskip("rocm.bindings.rccl", reason=BINDINGS)
amdsmi = pytest.importorskip("rocm.bindings.amdsmi", reason=BINDINGS)

TABLES = Path(__file__).parents[2] / "crates" / "gpu" / "src" / "sys"


def text(table: str) -> str:
    return (TABLES / f"{table}.rs").read_text()


def constant(table: str, name: str) -> int:
    return int(re.search(rf"pub const {name}: \w+ = (0x[\da-f_]+|[\d_]+);", text(table))[1].replace("_", ""), 0)


def of_amd(table: str, struct: str) -> dict[str, int]:
    """The numbers of the variant that a table has for AMD."""
    body = text(table).split(f"Vendor::Amd => {struct} {{", 1)[1].split("\n            }", 1)[0]
    return {name: int(value) for name, value in re.findall(r"(\w+): (\d+)", body)}


def value(module, name: str) -> int:
    spaces = [module, *(of for of in vars(module).values() if isinstance(of, type) and issubclass(of, enum.Enum))]
    (found,) = {int(getattr(of, name)) for of in spaces if hasattr(of, name)}
    return found


def size(kind) -> int:
    return kind.allocate(1).c_sizeof()


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        ("SUCCESS", "hipSuccess"),
        ("ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory"),
        ("ERROR_NOT_READY", "hipErrorNotReady"),
        ("ERROR_PEER_ACCESS_ALREADY_ENABLED", "hipErrorPeerAccessAlreadyEnabled"),
        ("CAPTURE_MODE_THREAD_LOCAL", "hipStreamCaptureModeThreadLocal"),
    ],
)
def test_numbers_that_cuda_and_hip_share(own, theirs):
    assert constant("driver", own) == value(hip, theirs)


def test_attributes_of_devices():
    names = {
        "shared_memory_per_block_optin": "hipDeviceAttributeMaxSharedMemoryPerBlock",
        "clock_rate_khz": "hipDeviceAttributeClockRate",
        "multiprocessor_count": "hipDeviceAttributeMultiprocessorCount",
        "compute_capability_major": "hipDeviceAttributeComputeCapabilityMajor",
        "compute_capability_minor": "hipDeviceAttributeComputeCapabilityMinor",
        "memory_clock_rate_khz": "hipDeviceAttributeMemoryClockRate",
        "global_memory_bus_width_bits": "hipDeviceAttributeMemoryBusWidth",
        "l2_cache_size": "hipDeviceAttributeL2CacheSize",
    }
    assert of_amd("driver", "Attributes") == {own: value(hip, theirs) for own, theirs in names.items()}


def test_the_instruction_set_stands_where_the_driver_writes_it():
    place = re.search(r"before: \[u64; (\d+)\],\s+pub architecture: \[c_char; (\d+)\],\s+after: \[u64; (\d+)\]", text("driver"))
    before, length, after = (int(number) for number in place.groups())
    properties = hip.hipDeviceProp_t.allocate(1)
    assert properties.c_sizeof() == 8 * before + length + 8 * after
    ctypes.memmove(int(properties) + 8 * before, b"gfx942:xnack-\0", 14)
    assert properties.gcnArchName == "gfx942:xnack-"


def test_products():
    found = of_amd("cublaslt", "Numbers")
    descriptor = {name: f"HIPBLASLT_MATMUL_DESC_{name.upper()}" for name in (
        "pointer_mode", "transa", "transb", "epilogue", "bias_pointer", "bias_data_type", "a_scale_pointer",
        "b_scale_pointer", "a_scale_mode", "b_scale_mode",
    )}
    names = {
        **descriptor,
        "batch_count": "HIPBLASLT_MATRIX_LAYOUT_BATCH_COUNT",
        "strided_batch_offset": "HIPBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET",
        "max_workspace_bytes": "HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES",
    }
    expected = {own: value(hipblaslt, theirs) for own, theirs in names.items()}
    assert found == {**expected, "compute_32f": value(hipblas, "HIPBLAS_COMPUTE_32F")}
    operations = re.findall(r"operations: \[(\d+), (\d+)\]", text("cublaslt"))[1]
    assert [int(of) for of in operations] == [value(hipblas, "HIPBLAS_OP_N"), value(hipblas, "HIPBLAS_OP_T")]
    assert constant("cublaslt", "EPILOGUE_BIAS") == value(hipblaslt, "HIPBLASLT_EPILOGUE_BIAS")
    for name in ("R_32F", "R_16F", "R_16BF", "R_8F_E4M3", "R_8F_E5M2", "R_8F_E4M3_FNUZ", "R_8F_E5M2_FNUZ"):
        assert constant("cublaslt", name) == value(hip, f"HIP_{name}"), name
    assert int(re.search(r"POINTER_MODE_DEVICE: i32 = (\d+)", text("cublaslt"))[1]) == value(hipblaslt, "HIPBLASLT_POINTER_MODE_DEVICE")


def test_answers_of_the_heuristic_have_the_size_of_the_library():
    assert size(hipblaslt.hipblasLtMatmulHeuristicResult_t) == 56


def test_names_of_states_stand_in_their_places():
    listed = re.findall(r'"(HIPBLAS_STATUS_\w+)"', text("cublaslt"))
    assert listed and all(value(hipblas, name) == place for place, name in enumerate(listed))


def test_collectives():
    assert constant("nccl", "BYTES") == value(rccl, "ncclUint8")
    assert constant("nccl", "IN_PROGRESS") == value(rccl, "ncclInProgress")
    # Later versions take the size of an earlier one, whose fields come first.
    assert size(rccl.ncclConfig_t) >= 48


def test_instruments():
    names = {
        "SUCCESS": "AMDSMI_STATUS_SUCCESS",
        "INIT_GPUS": "AMDSMI_INIT_AMD_GPUS",
        "CLOCK_GFX": "AMDSMI_CLK_TYPE_GFX",
        "CLOCK_MEMORY": "AMDSMI_CLK_TYPE_MEM",
        "TEMPERATURE_HOTSPOT": "AMDSMI_TEMPERATURE_TYPE_HOTSPOT",
        "TEMPERATURE_CURRENT": "AMDSMI_TEMP_CURRENT",
    }
    assert {own: constant("amdsmi", own) for own in names} == {own: value(amdsmi, of) for own, of in names.items()}
    kinds = ("engine_usage", "clk_info", "power_info", "vram_usage", "power_cap_info", "driver_info")
    sizes = [size(getattr(amdsmi, f"amdsmi_{kind}_t")) for kind in kinds]
    own = re.findall(r"assert_eq!\(\(size_of::.*?\), \((\d+), (\d+), (\d+)\)\);", text("amdsmi"))
    assert [int(number) for row in own for number in row] == sizes


def test_every_function_of_the_tables_is_declared():
    modules = {"driver": [hip], "nvrtc": [], "cublaslt": [hipblaslt], "nccl": [rccl], "amdsmi": [amdsmi]}
    for table, declared in modules.items():
        rows = re.findall(r"^    (\w+)(?: = (\w+))?\(", text(table), re.MULTILINE)
        names = [twin or name for name, twin in rows if twin != "none" and not (name.startswith("cu") and not twin)]
        names = [name.removesuffix("R0600") for name in names if name not in ("unavailable",)]
        assert names or not declared
        for name in names if declared else []:
            assert any(hasattr(of, name) for of in declared), f"{table}: {name}"
