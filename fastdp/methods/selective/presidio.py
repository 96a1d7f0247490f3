"""Microsoft Presidio's pattern recognisers as a detector, without a language model and without the network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastdp.methods.selective.spans import Span


class PresidioDetector:
    """A Presidio analyzer as a `PrivacyDetector`, for some entities or all that it supports.

    Give an ``AnalyzerEngine`` of your own, with whatever language model it loads, or none for Presidio's pattern recognisers
    alone. Its default engine downloads a language model, and its e-mail recogniser a list of domain suffixes; here neither
    happens.
    """

    def __init__(self, analyzer: Any = None, entities: Sequence[str] | None = None, language: str = "en") -> None:
        self.analyzer = _patterns_only(language) if analyzer is None else analyzer
        self.patterns_only = analyzer is None
        self.entities = None if entities is None else list(entities)
        self.language = language

    def detect(self, texts: Sequence[str]) -> list[list[Span]]:
        return [
            [
                Span(found.entity_type, found.start, found.end, float(found.score))
                for found in self.analyzer.analyze(text=text, language=self.language, entities=self.entities)
                if found.end > found.start
            ]
            for text in texts
        ]

    def describe(self) -> dict[str, Any]:
        return {
            "name": "presidio",
            "version": version("presidio-analyzer"),
            "patterns_only": self.patterns_only,
            "entities": self.entities,
            "language": self.language,
        }


def _patterns_only(language: str) -> Any:
    try:
        import tldextract
        from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
        from presidio_analyzer.nlp_engine import NoOpNlpEngine
    except ImportError:
        raise ImportError("the Presidio detector needs presidio-analyzer: pip install 'fastdp-lm[pii]'") from None
    # The e-mail recogniser calls this module-level function, which would fetch the newest list of suffixes.
    tldextract.extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    registry = RecognizerRegistry(supported_languages=[language])
    registry.load_predefined_recognizers(languages=[language])
    for recogniser in list(registry.recognizers):
        if type(recogniser).__name__ in ("SpacyRecognizer", "StanzaRecognizer", "TransformersRecognizer"):
            registry.remove_recognizer(recogniser.name)
    engine = NoOpNlpEngine([{"lang_code": language, "model_name": "none"}])
    engine.load()
    return AnalyzerEngine(registry=registry, nlp_engine=engine, supported_languages=[language])
