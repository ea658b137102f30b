"""The OpenAPI description of a service: the columns of its run, and an example row."""

from __future__ import annotations

from typing import Any

import numpy as np

import bayou
from bayou.data.encoders import Number
from bayou.data.preprocess import TablePreprocessor
from bayou.runs.service import JSON, Service


def openapi(service: Service, token: bool = False) -> JSON:
    """The OpenAPI description of a service, with the columns of its run and an example row."""
    row, text = row_schema(service), {"type": "string"}
    level = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1, "default": service.level}
    request = _object(rows={"type": "array", "minItems": 1, "maxItems": service.max_rows, "items": row}, level=level)
    request |= {"required": ["rows"], "additionalProperties": False, "example": {"rows": [row["example"]]}}
    keys = "class probability probabilities" if service.preprocessor.class_names else "mean std epistemic_std interval"
    prediction = _object(**{name: {} for name in f"{keys} entropy mutual_information".split()})
    answer = _object(predictions={"type": "array", "items": prediction}, notes={"type": "array", "items": text})
    errors = {status: _content("what is wrong", _object(error=text)) for status in ("4XX", "503", "504")}
    paths: JSON = {"/predict": {"post": {"summary": "predictions for rows, in their order"}}}
    paths["/predict"]["post"] |= {"requestBody": _content("rows", request) | {"required": True}}
    paths["/predict"]["post"] |= {"responses": {"200": _content("predictions", answer)} | errors}
    for path, words in (("/", "what to send: task, columns, classes, limits"), ("/healthz", "whether a slot is free")):
        paths[path] = {"get": {"summary": words, "responses": {"200": _content(words, _object())} | errors}}
    found: JSON = {"openapi": "3.1.0", "info": {"title": service.name, "version": bayou.__version__}, "paths": paths}
    if token:
        found |= {"components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}}
        found |= {"security": [{"token": []}]}
    return found


def _object(**properties: JSON) -> JSON:
    return {"type": "object", "properties": properties}


def _content(words: str, schema: JSON) -> JSON:
    return {"description": words, "content": {"application/json": {"schema": schema}}}


def row_schema(service: Service) -> JSON:
    """The JSON schema of a row, with an example: columns by name with their types and categories, or pixels."""
    if not isinstance(service.preprocessor, TablePreprocessor):
        shape = service.describe().get("shape", ())
        example: Any = np.zeros(shape, int).tolist()
        return {"type": "array", "description": f"pixels of shape {list(shape)}", "example": example}
    properties, example = dict[str, JSON](), dict[str, Any]()
    for column in service.preprocessor.columns:
        if isinstance(column, Number):
            words = f"a number; {column.low:g} to {column.high:g} in training"
            properties[column.name] = {"type": ["number", "null"], "description": words}
            example[column.name] = float(f"{column.median:.6g}")
        else:
            words = f"a category: {', '.join(column.levels)}; another counts as none of these"
            properties[column.name] = {"type": ["string", "number", "null"], "examples": list(column.levels)}
            properties[column.name] |= {"description": words}
            example[column.name] = column.levels[0] if column.levels else None
    return {"type": "object", "properties": properties, "additionalProperties": False, "example": example}
