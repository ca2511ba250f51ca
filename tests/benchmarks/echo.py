"""A worker that says what it is told, and may be slow or end."""

import time

from benchmarks.workers import Answers


def work() -> None:
    answers = Answers()
    print("what libraries print is no answer")
    answers.say(settings=answers.settings)
    for message in answers.messages():
        if "exit" in message:
            raise SystemExit(f"ended as told: {message['exit']}")
        time.sleep(message.get("sleep_s", 0))
        answers.say(heard=message)


if __name__ == "__main__":
    work()
