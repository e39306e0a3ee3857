"""Mathematical answers: extraction, exact comparison, killable symbolic worker (no torch, no sympy in this process)."""

from quads.rewards.math.grade import ANSWER_TYPES, AnswerType, grade, grade_aime, validate_gold

__all__ = ["ANSWER_TYPES", "AnswerType", "grade", "grade_aime", "validate_gold"]
