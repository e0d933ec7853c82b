-- Responses without reward, for reading: prompt, response, truth, extracted answer and why; equally many per category and kind.
-- :phase = "eval"
-- :step = null
-- :category = ""
-- :failure_kind = ""
-- :limit = null

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
      AND ($failure_kind = '' OR failure_kind = $failure_kind)
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
    CASE
        WHEN reward IS NULL THEN 'the grade failed: ' || coalesce(grade_error, 'unknown') || coalesce(': ' || grade_error_detail, '')
        WHEN reward > 0.5 AND NOT isnan(reward) THEN 'it was rewarded'
        WHEN failure_kind = 'truncated' THEN 'cut off after ' || num_response_tokens || ' tokens, before its answer'
        WHEN failure_kind = 'empty' THEN 'there is nothing in the answer'
        WHEN failure_kind = 'no_think_close' THEN 'the thinking is never closed: there is no </think>'
        WHEN failure_kind = 'no_answer_tags' THEN 'there is no answer where the grader looks: in <answer> tags, or in \boxed{} for question_only'
        WHEN failure_kind = 'malformed_tags' THEN 'the tags are there, but not as "</think> <answer>" ... "</answer>"'
        WHEN failure_kind = 'multiple_answers' THEN 'there is more than one answer'
        WHEN failure_kind = 'unparsed_answer' THEN 'the answer cannot be read as mathematics'
        WHEN failure_kind = 'low_reward' THEN 'the reward is ' || reward || ', and the grader said no more'
        WHEN failure_kind = 'wrong_answer' THEN 'the answer differs from the truth'
        WHEN failure_kind = 'correct_but_unformatted' THEN 'the answer is right, but stands where the format does not allow it: the fault is the parser''s, not the model''s'
        ELSE coalesce(failure_kind, 'unknown')
    END AS why,
    ground_truth,
    extracted_answer,
    num_response_tokens,
    finish_reason,
    prompt,
    response
FROM rollouts JOIN chosen USING (run_id, step, example_id, sample_index)
WHERE phase = $phase
ORDER BY turn = $limit, run_id, category = 'grade_error', category DESC, failure_kind, sample_index, example_id;
