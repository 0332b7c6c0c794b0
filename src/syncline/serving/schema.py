"""The fields of requests and answers; they are checked by, and shown in, the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Compression = Literal["none", "zlib", "zstd"]
Checksum = Literal["none", "adler32", "alder32", "blake3", "sha256", "xxh3-128"]

_Identity = Field(
    description="A version's number, such as 123, or its directory name, weight_v000123.",
    min_length=1,
    max_length=255,
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Incremental(_Strict):
    """Says that the version is a delta, and on what."""

    previous_snapshot_identity: str = _Identity
    compression_format: Compression = Field(
        "zstd", description="Checked to be one that is known; the store says which was used."
    )
    checksum_format: Checksum = Field(
        "xxh3-128",
        description="As compression_format; alder32 is what Fireworks calls Adler-32.",
    )


class HotLoad(_Strict):
    """Which version to load."""

    identity: str = _Identity
    incremental_snapshot_metadata: Incremental | None = Field(
        None, description="Of a delta; without it the version may be reached in any way."
    )
    reset_prompt_cache: bool | Literal["new_session"] | None = Field(
        None,
        description="Whether the prompt cache is reset with the commit. Without it: yes, where the "
        "replica has one. Refused (400) if it asks for a reset and there is nothing to reset.",
    )


class Accepted(BaseModel):
    """The order was taken; GET says when it is done."""

    accepted: bool
    identity: str
    already_current: bool = Field(description="Every replica serves this version already.")


class LoadingState(BaseModel):
    """How far a replica is."""

    stage: Literal["loading", "done", "error"]


class ReplicaAnswer(BaseModel):
    """One replica. It has a version if it is ready and serves that identity."""

    replica: str
    readiness: bool = Field(
        description="It serves current_snapshot_identity, all of it, and is neither loading nor stuck."
    )
    current_snapshot_identity: str | None = Field(
        description="What it serves, spelled as the last order spelled it; null for nothing known."
    )
    readiness_reason: str | None = Field(description="Why it is not ready; null if it is.")
    loading_state: LoadingState


class Status(BaseModel):
    """All replicas."""

    replicas: list[ReplicaAnswer]


class Serves(BaseModel):
    """The version asked for is served by every replica."""

    current_versions: list[int | None] = Field(description="By replica.")


class ErrorBody(BaseModel):
    """What went wrong."""

    type: str
    message: str
    target_version: int | None = None
    current_version: int | None = None


class Error(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorBody
