"""Measurements that the command line and the scripts in `benchmarks/` share."""

from syncline.bench.codecs import CodecFigures, bench_codecs

__all__ = ["CodecFigures", "bench_codecs"]
