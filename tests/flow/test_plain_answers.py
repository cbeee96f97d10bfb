"""Answers that are not streamed."""

from tests.flow.stack import CHAT, fresh, rest_of, run, sim


def test_a_whole_answer_gives_its_place_back_before_the_client_has_it() -> None:
    async def test() -> None:
        async with fresh(chat={"c": sim()}) as stack:
            record = stack.record()

            answer = await stack.flow.send(stack.job(CHAT), record)

            with answer:
                assert answer.is_whole
                assert record.first_token_at_s is not None
                stack.check_ledger()
                assert await rest_of(answer)
            assert record.completion_tokens_used == 4
            await stack.check_at_rest()

    run(test())
