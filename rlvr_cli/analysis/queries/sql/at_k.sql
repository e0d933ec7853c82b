-- pass@k, best@k and majority@k of the same samples, each with its interval, over the questions with at least k samples.
-- :k = null
-- :phase = "eval"
-- :step = null
-- plot: x=k y=pass_at_k+best_at_k+majority_at_k log=x title="Of k samples" y_label="share of questions"

-- The samples of each question, the one with the highest mean log-probability first, from which `rlvr analyze at_k` computes
-- the three; without $k for 1, 2, 4, ... and the largest number of samples of a question. A failed grade counts as no reward.
-- Only whether answers are equal matters, so each is its hash: answers may be long. Spellings of one answer are one answer, by
-- those rules of the graders that are cheap: what only typesets is dropped, and a number of up to 15 characters, which a
-- DOUBLE can tell from every other, is its value. Thousands are read before white space goes, since `1, 234` is two numbers.
-- Answers that the graders tell apart stay apart.
WITH latest AS (
    SELECT run_id, max(step) AS step FROM rollouts WHERE phase = $phase GROUP BY run_id
),
samples AS (
    SELECT
        run_id, rollouts.step AS step, example_id,
        coalesce(reward, 0) AS reward,
        coalesce(reward > 0.5 AND NOT isnan(reward), false) AS correct,
        CASE WHEN NOT isnan(mean_logprob) THEN mean_logprob END AS logprob,
        regexp_replace(extracted_answer, '\\[()\[\]]|\\(left|right|displaystyle)\b|\\?\$', '', 'g') AS answer
    FROM rollouts JOIN latest USING (run_id)
    WHERE phase = $phase AND rollouts.step = coalesce($step::BIGINT, latest.step)
),
plain AS (
    SELECT * REPLACE (regexp_replace(
        regexp_replace(
            regexp_replace(answer, '\\(text|textbf|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}', '\2', 'g'),
            '\\[dtc]frac', '\\frac', 'g'
        ),
        '^\s+|\s*\.?\s*$', '', 'g'
    ) AS answer)
    FROM samples
),
spaced AS (  -- with white space only between letters or digits: 2 1/2 is not 21/2, nor is 2\,1/2
    SELECT * REPLACE (CASE
        WHEN regexp_full_match(answer, '[-+]?\s*\d{1,3}((,|(,\\!|\{,\}|\\!,|,\\,|\\,)\s*)\d{3})+(\.\d+)?')
        THEN regexp_replace(answer, '[^-+.\d]', '', 'g')
        ELSE regexp_replace(regexp_replace(answer, '(\\[,;:!]|\s)+', ' ', 'g'), ' \B|\B ', '', 'g')
    END AS answer)
    FROM plain
),
written AS (
    SELECT * REPLACE (CASE
        WHEN regexp_full_match(answer, '(?i)yes|no|[a-z ]*[a-z]{4}[a-z ]*') THEN lower(answer)
        ELSE regexp_replace(answer, '^([-+]?)\\frac(?:\{([-+]?\d+)\}|(\d))(?:\{(\d+)\}|(\d))$', '\1\2\3/\4\5')
    END AS answer)
    FROM spaced
)
SELECT
    run_id, step, example_id, reward, correct,
    CASE
        WHEN answer = '' THEN NULL
        WHEN length(answer) <= 15 AND regexp_full_match(answer, '[-+]?(\d+|\d*\.\d+)(/\d*[1-9]\d*)?')
        THEN hash(split_part(answer, '/', 1)::DOUBLE / coalesce(nullif(split_part(answer, '/', 2), ''), '1')::DOUBLE + 0)
        WHEN answer IS NOT NULL THEN hash(answer)
    END AS answer,
    logprob
FROM written
ORDER BY run_id, example_id, logprob DESC NULLS LAST;
