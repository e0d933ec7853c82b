-- Responses per category and run: count, share, mean reward, mean length in tokens, truncated share.
-- :phase = "eval"
-- :step = null
-- plot: x=run_id lines=category y=share counts=samples zeros=share,samples bars=yes

-- The interval of a share is that of Agresti and Coull (1998) for the effective number of samples, as in `rlvr analyze summary`.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), chosen AS (
    SELECT rollouts.* FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
), answers AS (
    SELECT run_id, example_id, category, count(*) AS hits FROM chosen GROUP BY run_id, example_id, category
), asked AS (
    SELECT run_id, example_id, sum(hits)::BIGINT AS n FROM answers GROUP BY run_id, example_id
), questions AS (
    SELECT run_id, sum(n) AS samples, count(*) AS questions, sum(n * n) AS squares FROM asked GROUP BY run_id
), hits AS (
    SELECT
        run_id, category,
        sum(hits * hits) AS squares_of_hits, sum(hits * n) AS products,  -- of whole numbers: exact in any order
        count(*) AS with_it, count(*) FILTER (hits = n) AS without_others
    FROM answers JOIN asked USING (run_id, example_id)
    GROUP BY run_id, category
), counts AS (
    SELECT
        run_id, step, category,
        count(*) AS samples,
        count(*) / sum(count(*)) OVER (PARTITION BY run_id) AS share,
        avg(coalesce(reward, 0)) AS mean_reward,
        avg(policy_tokens(episode, num_response_tokens)) AS mean_tokens,
        avg((finish_reason = 'length')::INT) AS truncated_share
    FROM chosen
    GROUP BY run_id, step, category
), effective AS (
    SELECT
        counts.*,
        questions.squares / questions.samples ** 2 AS alike,
        least(with_it, questions.questions - without_others) AS rarer,  -- questions with the rarer outcome
        greatest(
            (squares_of_hits - 2 * share * products + share ** 2 * questions.squares) / questions.samples ** 2
                / nullif(share * (1 - share), 0),
            1 / questions.samples
        ) AS seen  -- how much the questions vary: 1 / the number of independent samples that would vary as much
    FROM counts JOIN hits USING (run_id, category) JOIN questions USING (run_id)
), numbers AS (
    SELECT *, CASE WHEN rarer = 0 THEN 1 / alike ELSE (rarer + 1) / (rarer * seen + alike) END AS n FROM effective
)
SELECT
    run_id, step, category, samples, share, share_low(share, n) AS low, share_high(share, n) AS high,
    mean_reward, mean_tokens, truncated_share
FROM numbers
ORDER BY run_id, category = 'grade_error', category DESC;
