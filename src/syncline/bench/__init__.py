"""Measurements that the command line and the scripts in `benchmarks/` share."""

from syncline.bench.codecs import CodecFigures, bench_codecs
from syncline.bench.kernels import KernelFigures, bench_kernels

__all__ = ["CodecFigures", "KernelFigures", "bench_codecs", "bench_kernels"]
