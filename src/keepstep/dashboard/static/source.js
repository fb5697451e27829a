/** The source of the page's data: the dashboard's server, or in a report the page itself. */

/** The dashboard's server. It sends the whole state first, then updates; older phases on request. */
class Server {
  isLive = true;

  /** Connects or reconnects. `on` must have snapshot(message), update(message) and error(). */
  listen(on) {
    this.close();
    this.events = new EventSource("api/stream");
    for (const name of ["snapshot", "update"])
      this.events.addEventListener(name, (event) => on[name](JSON.parse(event.data)));
    this.events.addEventListener("error", () => on.error());
  }

  close() {
    this.events?.close();
  }

  /** @returns {Promise<{status: number, data: object|null}>} completed steps over time; status 0 without an answer */
  overview() {
    return this.ask("api/overview");
  }

  /** @returns {Promise<{status: number, data: object|null}>} the phases between two times */
  phases(begin, end) {
    return this.ask(`api/phases?begin=${begin}&end=${end}`);
  }

  async ask(path) {
    const answer = await fetch(path).catch(() => null);
    return { status: answer?.status ?? 0, data: answer?.ok ? await answer.json() : null };
  }
}

/** A report. It contains all data from the start, and nothing changes. */
class Report {
  isLive = false;

  constructor(page, numbers) {
    Object.assign(this, { page, numbers });
  }

  listen(on) {
    on.snapshot({ ...this.page.snapshot, phases: { t: [], r: [] }, phases_from: this.page.snapshot.now });
  }

  async overview() {
    const { bucket_s: bucket, steps_per_bucket: steps } = this.numbers;
    return { status: 200, data: { bucket: bucket * 1e6, steps } };
  }
}

const embedded = (id) => JSON.parse(document.getElementById(id).textContent);

/** The source of this page. */
export const source = document.getElementById("page") ? new Report(embedded("page"), embedded("report")) : new Server();
