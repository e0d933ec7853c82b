-- Questions with the lowest pass rate over the whole run, with the most frequent wrong answer; the hardest first.
-- :phase = "eval"
-- :step = null
-- :least = 1
-- :limit = null
-- plot: none

-- Only questions with at least :least samples. `question` is the prompt without the text of the r1_zero template.
WITH answers AS (
    SELECT
        run_id, example_id,
        nullif(trim(extracted_answer), '') AS answer,
        count(*) AS n,
        count(*) FILTER (reward > 0.5 AND NOT isnan(reward)) AS c,
        count(*) FILTER (reward IS NULL) AS grade_errors
    FROM rollouts
    WHERE phase = $phase AND step = coalesce($step::BIGINT, step)
    GROUP BY ALL
), rates AS (
    SELECT
        run_id, example_id,
        sum(n) AS samples,
        sum(c) AS correct,
        sum(grade_errors) AS grade_errors,
        arg_max(answer, (n - c, answer)) FILTER (n > c AND answer IS NOT NULL) AS wrong_answer,
        max(n - c) FILTER (answer IS NOT NULL) AS times
    FROM answers
    GROUP BY ALL
    HAVING sum(n) >= $least
), ranked AS (
    SELECT *, row_number() OVER (PARTITION BY run_id ORDER BY correct / samples, samples DESC, example_id) AS place
    FROM rates
    QUALIFY place <= coalesce($limit, 1000000000)
), texts AS (
    SELECT run_id, example_id, any_value(ground_truth) AS ground_truth, any_value(prompt) AS prompt
    FROM rollouts SEMI JOIN ranked USING (run_id, example_id)
    WHERE phase = $phase AND sample_index = 0
    GROUP BY ALL
)
SELECT
    run_id,
    example_id,
    samples::BIGINT AS samples,
    correct / samples AS pass_rate,
    grade_errors::BIGINT AS grade_errors,
    ground_truth,
    wrong_answer,
    CASE WHEN wrong_answer IS NOT NULL THEN times END AS times,
    regexp_extract(prompt, '(?s)^(?:.*User: )?(.*?)(?:\s*Assistant: <think>)?$', 1) AS question
FROM ranked LEFT JOIN texts USING (run_id, example_id)
ORDER BY place, run_id;
