"""Measurements that the command line and the scripts in `benchmarks/` share."""

from syncline.bench.codecs import CodecFigures, bench_codecs
from syncline.bench.kernels import KernelFigures, bench_kernels
from syncline.bench.pipeline import PipelineFigures, bench_pipeline

__all__ = [
    "CodecFigures",
    "KernelFigures",
    "PipelineFigures",
    "bench_codecs",
    "bench_kernels",
    "bench_pipeline",
]
