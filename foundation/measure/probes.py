"""Texts and conversations that two readers of text are compared on: each has parts that tokenizers and chat templates treat differently."""

from __future__ import annotations

PROBES = (
    "The 12 men of  1999 paid   3,50 and\t 7.",
    "    if x ==  10:\n        return  1\n\n\n  # 2",
    "Hello , world ! It 's \"so\" -- isn't it? (yes) [no] {x} <y> a/b #1 @me $5 50% 1+1=2 ... !!",
    " leading, trailing ",
    "Gr\u00fc\u00dfe, caf\u00e9, na\u00efve; \u0395\u03bb\u03bb\u03ac\u03b4\u03b1 \u0416\u0443\u043a",
    "\u4f60\u597d\uff0c\u4e16\u754c \ud55c\uad6d\uc5b4 \u0663\u0664 \ufb01 \u2026 \u00bd \u00a0 \u200b",
    "e\u0301 o\u0308 \U0001f600 \U0001f469\u200d\U0001f680 \ufe0f",
    "UPPER lower CamelCase snake_case x2y3 0x1F 3.14e-10 1,000,000",
)
"""Texts: digits next to spaces, code, punctuation, scripts, letters of several code points."""
CHATS = (
    ({"role": "user", "content": "What is  2 + 2?"},),
    (
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "Hi\n\n <b>\"x\" & 'y'</b>"},
        {"role": "assistant", "content": "Gr\u00fc\u00dfe "},
        {"role": "user", "content": ""},
    ),
)
"""Conversations: one question, and several turns with an empty one."""
