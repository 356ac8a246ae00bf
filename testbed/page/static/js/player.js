// The instant that the page shows, in scenario seconds: it follows a live run, or replays what happened.

export const SPEEDS = [0.25, 0.5, 1, 2, 5, 10, 20, 50, 100];

export class Player {
  constructor() {
    this.t = 0;
    this.end = 0;
    this.speed = 10;
    this.isPlaying = false;
    this.isFollowing = false;
    this.listeners = [];
  }

  // listener(isJump) is called whenever the instant may have changed; isJump: not by the clock.
  onChange(listener) {
    this.listeners.push(listener);
  }

  changed(isJump) {
    for (const listener of this.listeners) listener(isJump);
  }

  seek(t) {
    this.t = Math.max(0, Math.min(t, this.end));
    this.isFollowing = false;
    this.changed(true);
  }

  play() {
    if (this.t >= this.end) this.t = 0;
    this.isPlaying = true;
    this.isFollowing = false;
    this.changed(true);
  }

  pause() {
    this.isPlaying = false;
    this.isFollowing = false;
    this.changed(true);
  }

  follow() {
    this.isFollowing = true;
    this.isPlaying = false;
    this.t = this.end;
    this.changed(true);
  }

  setEnd(end) {
    this.end = end;
    if (this.isFollowing) this.t = end;
  }

  // Advances the instant by elapsed real seconds, times the speed.
  tick(elapsed) {
    if (this.isFollowing) {
      this.t = this.end;
      this.changed(false);
    } else if (this.isPlaying) {
      this.t = Math.min(this.end, this.t + elapsed * this.speed);
      if (this.t >= this.end) this.isPlaying = false;
      this.changed(!this.isPlaying);
    }
  }
}
