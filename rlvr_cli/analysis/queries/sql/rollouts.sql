-- Responses to read, right or wrong, drawn at random: prompt, response, truth, extracted answer and why. Another seed, other ones.
-- :phase = "eval"
-- :step = null
-- :category = ""
-- :failure_kind = ""
-- :correct = null
-- :seed = 0
-- :limit = null
-- plot: none

-- The draw does not depend on the step: with one seed, each step shows its responses to the same questions.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), drawn AS (
    SELECT
        run_id, rollouts.step, example_id, sample_index,
        row_number() OVER (ORDER BY md5(concat_ws('/', $seed, run_id, example_id, sample_index)), run_id, example_id, sample_index) AS turn
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase
      AND rollouts.step = coalesce($step::BIGINT, latest.step)
      AND category = coalesce(nullif($category, ''), category)
      AND $failure_kind IN ('', failure_kind, kind_of_failure(reward, failure_kind, grade_error))
      AND ($correct IS NULL OR coalesce(reward > 0.5 AND NOT isnan(reward), false) = $correct::BOOLEAN)
    ORDER BY turn
    LIMIT $limit
)
SELECT
    run_id,
    step,
    example_id,
    sample_index,
    category,
    failure_kind,
    why_graded(reward, grade_error, grade_error_detail, failure_kind, policy_tokens(episode, rollouts.num_response_tokens)) AS why,
    ground_truth,
    extracted_answer,
    policy_tokens(episode, rollouts.num_response_tokens) AS num_response_tokens,
    finish_reason,
    prompt,
    response
FROM rollouts JOIN drawn USING (run_id, step, example_id, sample_index)
WHERE phase = $phase
ORDER BY turn;
