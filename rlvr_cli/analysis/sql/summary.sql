-- Accuracy, categories, lengths and failures of one phase and step, with intervals, and pass@k, best@k and majority@k.
-- :phase = "eval"
-- :step = null

-- A failed grade (NULL reward) counts as no reward, and is also counted as `ungraded`.
CREATE OR REPLACE TEMP TABLE chosen AS
SELECT
    step, example_id, category, grade_error,
    coalesce(reward, 0) AS reward,
    reward IS NULL AS ungraded,
    coalesce(reward > 0.5 AND NOT isnan(reward), false) AS correct,
    failure_kind,
    nullif(trim(extracted_answer), '') AS answer,
    num_response_tokens AS tokens,
    finish_reason = 'length' AS truncated,
    CASE WHEN NOT isnan(mean_logprob) THEN mean_logprob END AS logprob,
    mean_entropy AS entropy
FROM rollouts
WHERE phase = $phase
  AND step = coalesce($step::BIGINT, (SELECT max(step) FROM rollouts WHERE phase = $phase));

-- samples
SELECT
    max(step) AS step,
    count(*) AS samples,
    count(*) FILTER (correct) AS correct,
    count(*) FILTER (ungraded) AS ungraded,
    favg(reward) AS mean_reward,
    coalesce(bool_and(reward IN (0, 1)), true) AS binary_reward,
    favg(tokens) AS tokens,
    favg(tokens) FILTER (correct) AS tokens_correct,
    favg(tokens) FILTER (NOT correct) AS tokens_wrong,
    favg(truncated::INT) AS truncated,
    favg(entropy) AS entropy,
    favg(logprob) AS logprob,
    (
        SELECT any_value(value) FROM metrics
        WHERE phase = $phase AND step = (SELECT max(step) FROM chosen) AND name = 'sampling/tokens_per_second'
    ) AS tokens_per_second
FROM chosen;

-- questions, by their number of samples n, of correct samples c and their summed reward
SELECT n, c, total, count(*) AS questions
FROM (SELECT count(*) AS n, count(*) FILTER (correct) AS c, sum(reward) AS total FROM chosen GROUP BY example_id)
GROUP BY ALL
ORDER BY ALL;

-- categories
SELECT category, count(*) AS samples, favg(tokens) AS tokens
FROM chosen
GROUP BY ALL
ORDER BY category DESC;

-- questions, by category, number of samples n, and samples in that category; questions with none in it are left out
WITH asked AS (SELECT example_id, count(*) AS n FROM chosen GROUP BY ALL),
     found AS (SELECT example_id, category, count(*) AS hits FROM chosen GROUP BY ALL)
SELECT category, n, hits, count(*) AS questions
FROM found JOIN asked USING (example_id)
GROUP BY ALL
ORDER BY ALL;

-- failures
SELECT coalesce(failure_kind, 'grade_error: ' || grade_error, 'unknown') AS failure_kind, count(*) AS samples
FROM chosen
WHERE NOT correct
GROUP BY ALL
ORDER BY samples DESC, failure_kind;

-- for each n: the mean reward, over the questions with n samples, of the sample with the 1st, 2nd, ... highest
-- log-probability; tied samples all count with their mean. best@k is linear in these rewards, so the means are enough.
SELECT n, favg(reward) AS reward, count(*) AS questions, bool_or(missing) AS missing
FROM (
    SELECT
        count(*) OVER (PARTITION BY example_id) AS n,
        row_number() OVER (PARTITION BY example_id ORDER BY logprob DESC) AS position,
        avg(reward) OVER (PARTITION BY example_id, logprob) AS reward,
        logprob IS NULL AS missing
    FROM chosen
)
GROUP BY n, position
ORDER BY n, position;

-- questions, by the votes for the correct answer, the votes for each wrong answer, and the samples without an answer
SELECT correct, wrong, abstained, count(*) AS questions
FROM (
    SELECT
        coalesce(sum(votes) FILTER (correct), 0)::BIGINT AS correct,
        coalesce(list(votes ORDER BY votes) FILTER (NOT correct AND answer IS NOT NULL), []) AS wrong,
        coalesce(sum(votes) FILTER (NOT correct AND answer IS NULL), 0)::BIGINT AS abstained
    FROM (
        SELECT example_id, correct, CASE WHEN NOT correct THEN answer END AS answer, count(*) AS votes
        FROM chosen
        GROUP BY ALL
    )
    GROUP BY example_id
)
GROUP BY ALL
ORDER BY ALL;
