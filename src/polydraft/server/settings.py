"""What one server allows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What one server allows.

    model: the name that clients give, of the first of several.  keys: API keys, any of which opens; none asks for none.
    cors: origins whose pages may call; none.  most_body: bytes.  most_choices: prompts times n of a request.  seconds: of a request.
    drain: seconds that what runs has when the server ends.
    reasoning: whether chats tell what models think between <think> and </think> as `reasoning_content`.
    """

    model: str
    keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    most_body: int = 4 << 20
    most_choices: int = 64
    seconds: float = 600.0
    drain: float = 30.0
    reasoning: bool = True
