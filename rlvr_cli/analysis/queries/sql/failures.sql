-- Responses without reward, for reading: prompt, response, truth, extracted answer and why; equally many per category and kind.
-- :phase = "eval"
-- :step = null
-- :category = ""
-- :failure_kind = ""
-- :limit = null
-- plot: none

-- At most $limit rows are chosen, in turn from each category and, within a category, from each kind; one sample of each
-- question comes first. So a frequent category does not hide a rare one. `rlvr analyze` sets $limit to --limit + 1 and only
-- uses the last row to see that there are more.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
), failed AS (
    SELECT
        run_id, rollouts.step, example_id, sample_index, category, failure_kind,
        row_number() OVER kind AS place_in_kind
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase
      AND rollouts.step = coalesce($step::BIGINT, latest.step)
      AND category = coalesce(nullif($category, ''), category)
      AND $failure_kind IN ('', failure_kind, kind_of_failure(reward, failure_kind, grade_error))
      AND ($category <> '' OR (reward > 0.5 AND NOT isnan(reward)) IS NOT TRUE)
    WINDOW kind AS (PARTITION BY run_id, category, failure_kind ORDER BY sample_index, example_id)
), placed AS (
    SELECT *, row_number() OVER (PARTITION BY run_id, category ORDER BY place_in_kind, failure_kind) AS place
    FROM failed
), chosen AS (
    SELECT
        run_id, step, example_id, sample_index,
        row_number() OVER (ORDER BY place, category, run_id) AS turn
    FROM placed
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
FROM rollouts JOIN chosen USING (run_id, step, example_id, sample_index)
WHERE phase = $phase
ORDER BY turn = $limit, run_id, category = 'grade_error', category DESC, failure_kind, sample_index, example_id;
