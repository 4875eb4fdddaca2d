"""Structured output: grammars, masks of allowed tokens, and matchers for each tier. Imports no
torch."""

from __future__ import annotations

from engine.grammar.free_text import FreeText
from engine.grammar.grammar import Grammar
from engine.grammar.matcher import Matcher
from engine.grammar.matchers import MatcherFuture, Matchers, with_grammar_ready
from engine.grammar.vocabulary import GrammarVocabulary, load_vocabulary, synthetic_vocabulary

__all__ = [
    "FreeText",
    "Grammar",
    "GrammarVocabulary",
    "Matcher",
    "MatcherFuture",
    "Matchers",
    "load_vocabulary",
    "synthetic_vocabulary",
    "with_grammar_ready",
]
