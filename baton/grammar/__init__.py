"""Structured output: grammars, the tokens that they allow next, and where each tier gets them.
Imports no torch."""

from __future__ import annotations

from baton.grammar.free_text import FreeText
from baton.grammar.grammar import Grammar
from baton.grammar.matcher import Matcher
from baton.grammar.matchers import MatcherOrder, Matchers, with_grammar_ready
from baton.grammar.vocabulary import GrammarVocabulary, load_vocabulary, synthetic_vocabulary

__all__ = [
    "FreeText",
    "Grammar",
    "GrammarVocabulary",
    "Matcher",
    "MatcherOrder",
    "Matchers",
    "load_vocabulary",
    "synthetic_vocabulary",
    "with_grammar_ready",
]
