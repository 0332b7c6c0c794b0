"""The routes of the hot-load API over some replicas, as a FastAPI application."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from syncline.errors import ConfigError, FormatError, SynclineError
from syncline.hotload import Token, WeightVersion, identity
from syncline.hotload.client import PATH
from syncline.hotload.weight_version import EXACT, MINIMUM, MINIMUM_TOO
from syncline.serving import metrics
from syncline.serving.bearer import BearerGuard
from syncline.serving.body import StrictRoute
from syncline.serving.gate import error
from syncline.serving.order import LineageError, Order, UnknownVersionError
from syncline.serving.replica import Replica
from syncline.serving.schema import Accepted, Error, HotLoad, ReplicaAnswer, Serves, Status

METRICS_PATH = "/metrics"
CHECK_PATH = PATH.removesuffix("hot_load") + "weight_version"

_KINDS = {
    400: "BadRequest",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    413: "RequestTooLarge",
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Error, "description": description}
    for status, description in (
        (400, "The request is not legal; the message names the field."),
        (401, "The bearer token is missing or wrong."),
        (404, "The store has no such version."),
        (409, "The delta is not made on that, or cannot be reached; or the version is not served."),
        (413, "The body is too long."),
        (503, "The store cannot be read now; ask again."),
    )
}


def build(replicas: Sequence[Replica], token: Token | None) -> FastAPI:
    """Return the application; starting and closing the replicas is the caller's business.

    Raises:
        ConfigError: no replica, or two of one name.
    """
    names = [replica.name for replica in replicas]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"replicas: expected at least one, each of its own name, found {names}")
    app = FastAPI(title="Syncline hot-load", version="1", redoc_url=None)
    app.include_router(_router(tuple(replicas)))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(SynclineError, _failed)
    if token is not None:
        app.add_middleware(BearerGuard, token=token)
    return app


def _router(replicas: Sequence[Replica]) -> APIRouter:
    router = APIRouter(route_class=StrictRoute, responses=_ERRORS)

    @router.post(PATH, status_code=202)
    def hot_load(asked: HotLoad) -> Accepted:
        """Load a version into every replica, or refuse it before any of them has begun."""
        order = _order(asked)
        for replica in replicas:
            replica.check(order)
        is_news = [replica.take(order) for replica in replicas]
        return Accepted(accepted=True, identity=asked.identity, already_current=not any(is_news))

    @router.get(PATH)
    def status() -> Status:
        """What each replica serves, and whether it is ready."""
        answers = [ReplicaAnswer.model_validate(r.status().as_dict()) for r in replicas]
        return Status(replicas=answers)

    @router.get(METRICS_PATH, response_class=PlainTextResponse)
    def figures() -> PlainTextResponse:
        """Figures of each replica, for Prometheus."""
        return PlainTextResponse(metrics.text(replicas), media_type=metrics.CONTENT_TYPE)

    @router.get(CHECK_PATH)
    def weight_version(
        request: Request,
        exact_version: Annotated[str | None, Query(max_length=255)] = None,
        min_required_version: Annotated[str | None, Query(max_length=255)] = None,
        min_version: Annotated[str | None, Query(max_length=255)] = None,
    ) -> Serves:
        """Would a request with this weight_version be served now? 409 if not."""
        asked = {EXACT: exact_version, MINIMUM: min_required_version, MINIMUM_TOO: min_version}
        _check_query(request, asked)
        wanted = WeightVersion.parse(asked)
        for replica in replicas:
            refusal = replica.admission.refusal(wanted)
            if refusal is not None:
                raise HTTPException(409, refusal.as_dict()["error"])
        return Serves(current_versions=[replica.admission.served for replica in replicas])

    return router


def _check_query(request: Request, known: Collection[str]) -> None:
    """Check that a query asks nothing unknown, which would be answered as if it had not been asked."""
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known or names.count(name) > 1:
            raise FormatError(
                f"query: expected {', '.join(known)}, each at most once, found {name!r:.80}"
            )


def _order(asked: HotLoad) -> Order:
    version, spelling = identity.parse(asked.identity, "identity")
    previous = None
    if asked.incremental_snapshot_metadata is not None:
        previous, _ = identity.parse(
            asked.incremental_snapshot_metadata.previous_snapshot_identity,
            "incremental_snapshot_metadata.previous_snapshot_identity",
        )
    return Order(version, previous, asked.reset_prompt_cache, spelling)


async def _invalid(_: Request, fault: Exception) -> JSONResponse:
    """Answer 400 with the first field that is wrong, and without what the client sent."""
    first = fault.errors()[0] if isinstance(fault, RequestValidationError) else {}
    where = ".".join(str(part) for part in first.get("loc", ()) if part != "body")
    message = f"{where}: {first.get('msg', 'not legal')}" if where else "a JSON object is needed"
    return JSONResponse(error("BadRequest", message), 400)


async def _refused(_: Request, fault: Exception) -> JSONResponse:
    if not isinstance(fault, StarletteHTTPException):
        raise fault
    detail: object = fault.detail
    if isinstance(detail, dict):
        return JSONResponse({"error": detail}, fault.status_code)
    kind = _KINDS.get(fault.status_code, "Error")
    return JSONResponse(error(kind, str(detail)), fault.status_code, fault.headers)


async def _failed(_: Request, fault: Exception) -> JSONResponse:
    """Answer what the library raised: the client's fault, a conflict, or the store's state."""
    if isinstance(fault, UnknownVersionError):
        return JSONResponse(error("SnapshotNotFound", str(fault)), 404)
    if isinstance(fault, LineageError):
        return JSONResponse(error("SnapshotLineage", str(fault)), 409)
    if isinstance(fault, ConfigError | FormatError):
        return JSONResponse(error("BadRequest", str(fault)), 400)
    body = error(type(fault).__name__, str(fault))
    return JSONResponse(body, 503, {"Retry-After": "1"})
