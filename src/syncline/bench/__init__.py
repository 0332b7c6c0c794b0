"""Measurements that the command line and the scripts in `benchmarks/` share."""

from syncline.bench.codecs import CodecFigures, bench_codecs
from syncline.bench.kernels import KernelFigures, bench_kernels
from syncline.bench.picture import draw_transports
from syncline.bench.pipeline import PipelineFigures, bench_pipeline
from syncline.bench.transports import BUCKET_BYTES, TransportFigures, bench_transports

__all__ = [
    "BUCKET_BYTES",
    "CodecFigures",
    "KernelFigures",
    "PipelineFigures",
    "TransportFigures",
    "bench_codecs",
    "bench_kernels",
    "bench_pipeline",
    "bench_transports",
    "draw_transports",
]
