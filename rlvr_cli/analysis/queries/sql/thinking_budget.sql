-- Accuracy against the thinking budget: a row for each run of `rlvr eval --thinking-budget`, and how many thoughts it ended.
-- :phase = "eval"
-- plot: x=thinking_budget y=accuracy lines=evaluation log=x

-- A failed grade counts as not correct. The interval is that of Agresti and Coull (1998) for the effective number of samples, as
-- in `rlvr analyze pass_at_k`. A thought was ended where the response has a turn of the environment.
WITH budgets AS (
    SELECT run_id, try_cast(config ->> '$.thinking_budget' AS BIGINT) AS thinking_budget FROM runs
), questions AS (
    SELECT
        run_id, thinking_budget, example_id,
        count(*) AS n,
        avg(coalesce(reward > 0.5 AND NOT isnan(reward), false)::INT) AS share,
        sum((turns IS NOT NULL)::INT) AS ended,
        sum((reward IS NULL)::INT) AS failed,
        sum(num_response_tokens) AS tokens
    FROM rollouts JOIN budgets USING (run_id)
    WHERE phase = $phase AND thinking_budget IS NOT NULL
    GROUP BY ALL
), weighed AS (
    SELECT *, n / sum(n) OVER (PARTITION BY run_id) AS weight FROM questions
), means AS (
    SELECT
        run_id, thinking_budget,
        count(*) AS questions,
        sum(n)::BIGINT AS samples,
        sum(failed)::BIGINT AS grade_errors,
        sum(weight * share) AS accuracy,
        sum(ended) / sum(n) AS ended_share,
        sum(tokens) / sum(n) AS mean_tokens,
        least(sum((share > 0)::INT), sum((share < 1)::INT)) AS rarer,
        sum(weight ** 2) AS alike
    FROM weighed
    GROUP BY run_id, thinking_budget
), spreads AS (
    SELECT
        run_id,
        greatest(
            sum((weight * (share - accuracy)) ** 2) / nullif(any_value(accuracy * (1 - accuracy)), 0),
            1 / any_value(samples)
        ) AS seen  -- how much the questions vary: 1 / the number of independent samples that would vary as much
    FROM weighed JOIN means USING (run_id, thinking_budget)
    GROUP BY run_id
), effective AS (
    -- With one question more, whose samples are all alike: then there are as many samples as questions.
    SELECT *, coalesce((rarer + 1) / (rarer * seen + alike), 1 / alike) AS n
    FROM means JOIN spreads USING (run_id)
)
SELECT
    run_id,
    regexp_replace(run_id, '-' || thinking_budget || '$', '') AS evaluation,  -- its runs are RUN-128, RUN-512, ...
    thinking_budget, questions, samples, grade_errors, accuracy,
    share_low(accuracy, n) AS low,
    share_high(accuracy, n) AS high,
    ended_share, mean_tokens
FROM effective
ORDER BY thinking_budget, run_id;
