-- Responses without reward by failure kind: how many, how long, and whether model, parser, grader or environment is at fault.
-- :phase = "eval"
-- :step = null
-- plot: x=run_id lines=failure_kind y=share counts=samples zeros=share,samples bars=yes

WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), kinds AS (
    SELECT
        run_id,
        rollouts.step,
        coalesce(reward > 0.5 AND NOT isnan(reward), false) AS correct,
        kind_of_failure(reward, failure_kind, grade_error) AS failure_kind,
        bool_or(reward IS NULL) AS ungraded,
        count(*) AS samples,
        avg(policy_tokens(episode, num_response_tokens)) AS mean_tokens,
        avg((finish_reason = 'length')::INT) AS truncated_share
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
    GROUP BY ALL
)
SELECT
    run_id,
    step,
    failure_kind,
    samples,
    samples / sum(samples) OVER (PARTITION BY run_id) AS share,
    samples / sum(samples) OVER (PARTITION BY run_id, correct) AS share_of_failures,
    mean_tokens,
    truncated_share,
    CASE
        WHEN failure_kind = 'environment_error' THEN 'environment'
        WHEN ungraded THEN 'grader'
        WHEN failure_kind = 'correct_but_unformatted' THEN 'parser'
        WHEN failure_kind = 'unparsed_answer' THEN 'model or parser'
        ELSE 'model'
    END AS at_fault
FROM kinds
QUALIFY NOT correct
ORDER BY run_id, samples DESC, failure_kind;
